"""Tool loops and schemas with the official clients, unmodified, on the embedded model."""

from __future__ import annotations

import concurrent.futures
import json

import anthropic
import jsonschema_rs
import openai
import pytest
from agent_tools import TOOLS

pytest.importorskip("xgrammar", reason="the grammar extra is not installed")

WEATHER = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["town", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NOW}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
MODEL = "deepinfer-demo"
QUESTION = "What is the weather in Rome? Answer as json."
SHORT = {"temperature": 0, "max_tokens": 400}


@pytest.fixture(scope="module", params=["apart", "single-process"])
def server(request, tmp_path_factory, running_server):
    argv = () if request.param == "apart" else ("--single-process",)
    cache = tmp_path_factory.mktemp("kv")
    with running_server("--xgrammar-timeout", "4", *argv, cache_dir=cache) as one:
        yield one


@pytest.fixture
def oai(server):
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=180
    ) as client:
        yield client


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=180
    ) as client:
        yield client.messages


def check(name: str, arguments) -> None:
    jsonschema_rs.validate(SCHEMAS[name], arguments)


def chat_message(client, stream: bool, **asked):
    """The assistant's message and the finish reason, however they came."""
    asked = {"model": MODEL, "extra_body": {"thinking": {"type": "disabled"}}, **SHORT, **asked}
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    content, calls, finish = "", {}, None
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    delta.index,
                    {"id": delta.id, "type": "function", "function": {"name": "", "arguments": ""}},
                )
                call["function"]["name"] += delta.function.name or ""
                call["function"]["arguments"] += delta.function.arguments or ""
    message = {"role": "assistant", "content": content}
    return (
        message | {"tool_calls": [calls[i] for i in sorted(calls)]} if calls else message
    ), finish


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tool_loop(oai, stream):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    messages = [{"role": "user", "content": QUESTION}]
    named = {"type": "function", "function": {"name": "now"}}
    for choice, wanted in (("required", set(SCHEMAS)), (named, {"now"})):
        message, finish = chat_message(
            oai, stream, messages=messages, tools=tools, tool_choice=choice
        )
        assert finish == "tool_calls"
        messages.append(message)
        for call in message["tool_calls"]:
            assert call["function"]["name"] in wanted
            check(call["function"]["name"], json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Sun."})
    message, finish = chat_message(
        oai, stream, messages=messages, tools=tools, tool_choice="none", max_tokens=40
    )
    assert message["content"]
    assert finish in ("stop", "length")
    assert "tool_calls" not in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_tool_loop(oai, stream):
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": False}
        for name, schema in SCHEMAS.items()
    ]
    items = [{"role": "user", "content": QUESTION}]

    def create(**asked):
        asked = {
            "model": MODEL,
            "input": items,
            "tools": tools,
            "reasoning": {"effort": "none"},
            "temperature": 0,
            "max_output_tokens": 400,
            "store": False,
            **asked,
        }
        if not stream:
            return oai.responses.create(**asked)
        final = None
        for event in oai.responses.create(stream=True, **asked):
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
        return final

    named = {"type": "function", "name": "now"}
    for choice, wanted in (("required", set(SCHEMAS)), (named, {"now"})):
        response = create(tool_choice=choice)
        assert response.status == "completed"
        calls = [item for item in response.output if item.type == "function_call"]
        assert calls
        for call in calls:
            assert call.name in wanted
            check(call.name, json.loads(call.arguments))
            items.append(
                {
                    "type": "function_call",
                    "call_id": call.call_id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
            )
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}
            for call in calls
        ]
    assert create(tool_choice="none", max_output_tokens=40).output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_messages_tool_loop(claude, stream):
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    messages = [{"role": "user", "content": QUESTION}]

    def create(**asked):
        asked = {
            "model": MODEL,
            "messages": messages,
            "tools": tools,
            "thinking": {"type": "disabled"},
            "max_tokens": 400,
            # New releases of the client have no argument for it.
            "extra_body": {"temperature": 0},
            **asked,
        }
        if not stream:
            return claude.create(**asked)
        with claude.stream(**asked) as events:
            return events.get_final_message()

    named = {"type": "tool", "name": "now"}
    for choice, wanted in (({"type": "any"}, set(SCHEMAS)), (named, {"now"})):
        answer = create(tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        calls = [block for block in answer.content if block.type == "tool_use"]
        for call in calls:
            assert call.name in wanted
            check(call.name, call.input)
        messages.append({"role": "assistant", "content": [b.model_dump() for b in answer.content]})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "Sun."} for call in calls
        ]
        messages.append({"role": "user", "content": results})
    answer = create(tool_choice={"type": "none"}, max_tokens=40)
    assert [block.type for block in answer.content] == ["text"]


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_a_coding_agents_24_tools_are_taken(claude, choice):
    """In auto mode a grammar that would cost too much is left out; forced calls are held."""
    schemas = {
        name: {"type": "object", "properties": fields, "additionalProperties": False}
        for name, fields in TOOLS.items()
    }
    assert len(schemas) == 24
    answer = claude.create(
        model=MODEL, max_tokens=400, messages=[{"role": "user", "content": QUESTION}],
        tools=[{"name": name, "input_schema": schema} for name, schema in schemas.items()],
        tool_choice={"type": choice}, thinking={"type": "disabled"},
        extra_body={"temperature": 0},
    )  # fmt: skip
    calls = [block for block in answer.content if block.type == "tool_use"]
    if choice == "any":
        assert calls
        assert {call.name for call in calls} <= set(schemas)
        for call in calls if answer.stop_reason == "tool_use" else ():
            jsonschema_rs.validate(schemas[call.name], call.input)


@pytest.mark.parametrize("thinking", [False, True])
def test_schemas_hold_in_every_protocol(oai, claude, thinking):
    # What a model thinks is free text, and this one thinks little: it must get round to the answer.
    limit = 2000 if thinking else 400
    kind = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    chat = oai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=limit,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
        extra_body=kind,
    ).choices[0]
    response = oai.responses.create(
        model=MODEL,
        input=QUESTION,
        temperature=0,
        max_output_tokens=limit,
        store=False,
        reasoning={"effort": "high" if thinking else "none"},
        text={"format": {"type": "json_schema", "name": "p", "schema": PERSON, "strict": False}},
    )
    message = claude.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=limit,
        thinking={"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"},
        extra_body={
            "temperature": 0,
            "output_config": {"format": {"type": "json_schema", "schema": PERSON}},
        },
    )
    assert chat.finish_reason == "stop"
    assert message.stop_reason == "end_turn"
    texts = [
        chat.message.content,
        response.output_text,
        "".join(block.text for block in message.content if block.type == "text"),
    ]
    for text in texts:
        jsonschema_rs.validate(PERSON, json.loads(text))


def test_an_expression_holds(server):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Yes or no?"}],
        "thinking": {"type": "disabled"},
        "response_format": {"type": "regex", "regex": "(yes|no)[.!]"},
    }
    answer = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert answer["message"]["content"] in ("yes.", "yes!", "no.", "no!")


ENDLESS = {
    "type": "object",
    "properties": {
        letter: {"type": "string", "pattern": f"({letter}{{1,3000}}z{{1,3000}}){{1,3000}}"}
        for letter in "abcdefghijkl"
    },
}
"""Each of these expressions takes a compiler seconds."""


def test_a_schema_that_costs_too_much_is_refused_and_others_go_on(oai):
    def ask(schema):
        return oai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "json"}],
            **SHORT,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            extra_body={"thinking": {"type": "disabled"}},
        )

    ask(PERSON)  # the compilers have started
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        sick = pool.submit(ask, ENDLESS)
        others = [pool.submit(ask, {**PERSON, "title": f"n{i}"}) for i in range(2)]
        for other in others:
            jsonschema_rs.validate(PERSON, json.loads(other.result().choices[0].message.content))
        with pytest.raises(openai.BadRequestError) as refused:
            sick.result()
    # By its budget, before it reaches a compiler, or by the compiler's limit of time.
    assert refused.value.code in ("schema_too_complex", "invalid_value")
    with pytest.raises(openai.BadRequestError) as again:
        ask(ENDLESS)
    assert again.value.code == refused.value.code


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_named(oai, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        oai.chat.completions.create(
            model=MODEL,
            stream=stream,
            messages=[{"role": "user", "content": "json"}],
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "schema": {
                        "type": "object",
                        "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 3}},
                    },
                },
            },
        )
    assert refused.value.status_code == 400
    assert "minimum" in str(refused.value)
