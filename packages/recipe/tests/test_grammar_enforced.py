"""Whatever the logits, an answer under its grammar parses, validates and needs no repair."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    AssistantMessage,
    ChatCompletionRequest,
    ChatCompletionResponse,
    Conversation,
    InferenceChunk,
    InferenceFinishReason,
    MessagesRequest,
    MessagesResponse,
    PromptUsage,
    ResponsesRequest,
    ResponsesResponse,
    StreamProcessor,
    ToolCall,
    ToolDefinition,
    UserMessage,
    compile_grammar,
    render_training,
    request_grammar,
)

pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
pytestmark = [
    # Libraries that xgrammar loads warn about their own insides.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

import grammar_support as support  # noqa: E402

REQUESTS = {
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
RESPONSES = {
    "chat": ChatCompletionResponse,
    "responses": ResponsesResponse,
    "messages": MessagesResponse,
}
FEW = settings(
    max_examples=int(os.environ.get("GRAMMAR_EXAMPLES", "3")),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # an example is a compilation: too slow to shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = st.sampled_from(["a", "city", "Größe", "with space", "x-y", "日付"])
STRINGS = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 5),
        st.integers(0, 6),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-z]{2,5}$"},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
            {"type": "string", "format": "email"},
            {"type": "string", "format": "ipv4"},
            {"type": "string", "enum": ["x", "</think>x", 'a "b"', "<|>"]},
            {"const": "only\nthis"},
        ]
    ),
)
LEAVES = st.one_of(
    STRINGS,
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-20, 20),
        st.integers(0, 300),
    ),
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"type": ["integer", "boolean"]},
            {"enum": ["a", 1, None, {"k": [1, 2]}]},
            {"type": "number", "minimum": 0.5, "maximum": 2},
            {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
            {"type": "integer", "anyOf": [{"maximum": 3}, {"minimum": 8}]},
            {"$ref": "#/$defs/leaf"},
        ]
    ),
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], wanted: list[bool], closed: bool) -> dict[str, Any]:
        required = [n for n, need in zip(properties, wanted, strict=False) if need]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            **({"additionalProperties": False} if closed else {}),
        }

    return st.builds(
        build,
        st.dictionaries(NAMES, values, max_size=4),
        st.lists(st.booleans(), min_size=4, max_size=4),
        st.booleans(),
    )


VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": 3},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=4,
)
SCHEMAS = objects(VALUES).map(
    lambda schema: {**schema, "$defs": {"leaf": {"type": "array", "items": {"type": "boolean"}}}}
)


def answered(
    protocol: str, model: str, data: bytes, seed: int, opening: str = ""
) -> tuple[Any, list[str], str]:
    """A random answer to a request: the response body, the repairs, the raw text."""
    request = REQUESTS[protocol](data, profile="extended").convert(support.OPTIONS)
    grammar = request_grammar(request)
    assert grammar is not None
    compiled = compile_grammar(grammar.text, support.vocabulary(model))
    tokenizer = support.tokenizer(model)
    ids = support.random_answer(
        compiled, model, seed, prefix=grammar.prefix, begin=tokenizer.encode(opening)
    )
    more = {} if protocol == "messages" else {"created": 0}
    generator = REQUESTS[protocol].chunk_generator(request, "id", model, **more)
    processor = StreamProcessor(generator, request.parsing_options, tokenizer)
    response = RESPONSES[protocol]("id", model, 0, 1, 0)
    chunks = [
        InferenceChunk.ready(prompt_usage=PromptUsage(prompt_tokens=1)),
        *(InferenceChunk.tokens([token]) for token in ids[:-1]),
        InferenceChunk.finish(InferenceFinishReason.Stop),
    ]
    for chunk in chunks:
        for event in processor.push(chunk):
            response.accumulate(event)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    return json.loads(response.to_json()), processor.tool_call_repairs, text


def calls_of(protocol: str, response: Any) -> list[tuple[str, Any]]:
    if protocol == "chat":
        calls = response["choices"][0]["message"].get("tool_calls") or ()
        return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    if protocol == "responses":
        items = [item for item in response["output"] if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in items]
    blocks = [block for block in response["content"] if block["type"] == "tool_use"]
    return [(block["name"], block["input"]) for block in blocks]


def content_of(protocol: str, response: Any) -> str:
    if protocol == "chat":
        return response["choices"][0]["message"]["content"]
    if protocol == "responses":
        (message,) = (item for item in response["output"] if item["type"] == "message")
        return "".join(part["text"] for part in message["content"])
    return "".join(block["text"] for block in response["content"] if block["type"] == "text")


def check_calls(
    protocol: str, model: str, data: bytes, seed: int, tools: Any, opening: str = ""
) -> int:
    response, repairs, text = answered(protocol, model, data, seed, opening)
    assert repairs == [], text
    calls = calls_of(protocol, response)
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    for name, arguments in calls:
        assert name in schemas, text
        jsonschema_rs.validate(schemas[name], arguments, validate_formats=True)
    return len(calls)


@pytest.mark.parametrize("model", support.MODELS)
@pytest.mark.parametrize("protocol", REQUESTS)
@FEW
@given(
    schemas=st.lists(SCHEMAS, min_size=1, max_size=3), seed=st.integers(0, 2**32), one=st.booleans()
)
def test_required_calls_always_parse_and_validate(protocol, model, schemas, seed, one):
    tools = [{"name": f"tool_{i}", "parameters": schema} for i, schema in enumerate(schemas)]
    choice = "tool_0" if one else "required"
    data = support.body(protocol, model, thinking=False, tools=tools, choice=choice)
    assert check_calls(protocol, model, data, seed, tools[:1] if one else tools) >= 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("model", support.MODELS)
@pytest.mark.parametrize("protocol", REQUESTS)
@FEW
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=2), seed=st.integers(0, 2**32))
def test_where_a_model_opens_a_block_by_itself_its_calls_validate(
    protocol, model, thinking, schemas, seed
):
    tools = [{"name": f"tool_{i}", "parameters": schema} for i, schema in enumerate(schemas)]
    data = support.body(protocol, model, thinking=thinking, tools=tools, choice="auto")
    # Random text does not open a block of its own accord: write the opening, then let go.
    tag = "tool_calls>" if support.MODELS[model] == "v4" else " calls>"
    opening = f"{'hm</think>' if thinking else ''}Let me see.\n\n<｜DSML｜{tag}\n"
    assert check_calls(protocol, model, data, seed, tools, opening) >= 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("model", support.MODELS)
def test_free_text_beside_tools_has_no_markup_and_one_end_of_thinking(model, thinking):
    tools = [{"name": "now", "parameters": {"type": "object", "properties": {}}}]
    data = support.body("chat", model, thinking=thinking, tools=tools, choice="auto")
    for seed in range(6):
        response, repairs, text = answered("chat", model, data, seed)
        assert repairs == []
        assert text.count("</think>") == thinking
        assert "DSML" not in content_of("chat", response)
        for mark in ("<｜User｜>", "<｜Assistant｜>", "<think>", "<｜begin"):
            assert mark not in text


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("model", support.MODELS)
@pytest.mark.parametrize("protocol", REQUESTS)
@FEW
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_json_answers_always_validate(protocol, model, thinking, schema, seed):
    data = support.body(protocol, model, thinking=thinking, schema=schema)
    response, _, text = answered(protocol, model, data, seed)
    value = json.loads(content_of(protocol, response))
    jsonschema_rs.validate(schema, value, validate_formats=True)
    assert ("</think>" in text) or not thinking


CUSTOM = {
    "lark": ('start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,3}/\n', "[0-9]{1,3}[+][0-9]{1,3}"),
    "regex": ("(add|sub) [a-f]{2}", "(add|sub) [a-f]{2}"),
}


@pytest.mark.parametrize("syntax", CUSTOM)
@pytest.mark.parametrize("model", support.MODELS)
def test_the_input_of_a_custom_tool_matches_its_grammar(model, syntax):
    definition, expected = CUSTOM[syntax]
    data = json.dumps(
        {
            "model": model,
            "input": "go",
            "reasoning": {"effort": "none"},
            "tool_choice": "required",
            "tools": [
                {
                    "type": "custom",
                    "name": "calc",
                    "format": {"type": "grammar", "syntax": syntax, "definition": definition},
                }
            ],
        }
    ).encode()
    for seed in range(3):
        response, repairs, text = answered("responses", model, data, seed)
        assert repairs == []
        calls = [item for item in response["output"] if item["type"] == "custom_tool_call"]
        assert calls, text
        assert all(re.fullmatch(expected, call["input"]) for call in calls)


@pytest.mark.parametrize("model", support.MODELS)
def test_parameters_of_any_name_come_where_the_schema_asks_for_them(model):
    tools = [
        {
            "name": "put",
            "parameters": {
                "type": "object",
                "additionalProperties": {"type": ["integer", "string"], "maxLength": 4},
            },
        }
    ]
    data = support.body("chat", model, thinking=False, tools=tools, choice="required")
    assert sum(check_calls("chat", model, data, seed, tools) for seed in range(6)) >= 6


@pytest.mark.parametrize("model", support.MODELS)
@FEW
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_the_renderer_writes_is_what_the_grammar_allows(model, schema, seed):
    """A random call, rendered as history, is accepted by the grammar that made it."""
    tools = [{"name": "tool_0", "parameters": schema}]
    data = support.body("chat", model, thinking=False, tools=tools, choice="required")
    response, _, text = answered("chat", model, data, seed)
    calls = [
        ToolCall(f"c{i:03}", name, json.dumps(arguments, ensure_ascii=False))
        for i, (name, arguments) in enumerate(calls_of("chat", response))
    ]
    conversation = Conversation(
        [UserMessage("go"), AssistantMessage("", tool_calls=calls)],
        tools=[ToolDefinition("tool_0", None, schema)],
        thinking_mode=False,
    )
    request = ChatCompletionRequest(data, profile="extended").convert(support.OPTIONS)
    rendered = render_training(conversation, version=request.model_version).completion
    _, _, inside = rendered[rendered.index("<｜DSML｜") :].partition("\n")
    grammar = request_grammar(request)
    assert grammar is not None
    matcher = compile_grammar(grammar.text, support.vocabulary(model)).matcher()
    for token in support.tokenizer(model).encode(inside):
        assert matcher.accept(token), (inside, text)
    assert matcher.terminated
