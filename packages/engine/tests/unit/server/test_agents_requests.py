"""Requests of agents at their defaults, over HTTP: forced and listed tools, threads, switches."""

from __future__ import annotations

import json

import pytest
from server_fakes import Script, byte_codec

from deepinfer_engine.codec.recipe_codec import RecipeCodec

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
USER = {"role": "user", "content": "weather?"}
DSML = "\uff5cDSML\uff5c"
CALL = (
    f'<{DSML} invoke name="w">\n<{DSML} parameter name="city" string="true">Oslo'
    f"</{DSML} parameter>\n</{DSML} invoke>\n</{DSML} calls>"
)


def chat(codec, **more):
    tool = {"type": "function", "function": {"name": "w", "parameters": SCHEMA}}
    return {"model": codec.model_names[0], "messages": [USER], "tools": [tool], **more}


def prepared(codec: RecipeCodec, protocol: str, body: dict):
    return codec.prepare(protocol, json.dumps(body).encode(), 4096)


@pytest.mark.parametrize("enforces", [True, False])
def test_a_forced_tool_is_served_with_and_without_grammars(codec, enforces):
    codec = byte_codec(enforces=enforces)
    request = prepared(codec, "chat", chat(codec, tool_choice="required"))
    sampling = request.parts[0].sampling
    prompt = codec.detokenize(request.parts[0].token_ids)
    if enforces:
        assert prompt.endswith("<think>")
        assert sampling.constraint.needed
    else:
        assert prompt.endswith(f"</think>\n\n<{DSML} calls>\n")
        assert not sampling.constraint.needed  # the prompt opens the call


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({"tool_choice": "required"}, 100),
        ({"tool_choice": {"type": "function", "function": {"name": "w"}}}, 100),
        ({"tools": None, "response_format": FORMAT}, None),
        ({}, None),
    ],
)
def test_thinking_leaves_room_for_a_forced_call(more, most):
    codec = byte_codec(enforces=True)
    body = {**chat(codec, max_tokens=200), **more}
    request = prepared(codec, "chat", body)
    assert request.parts[0].sampling.constraint.think_tokens == most


def test_a_forced_tool_whose_grammar_is_too_large_is_opened_by_the_prompt(codec):
    codec = byte_codec(enforces=True)
    body = chat(codec, tool_choice="required")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x" * 40 + str(i) for i in range(9_000)]}},
    }
    body["tools"][0]["function"]["parameters"] = schema
    request = codec.prepare("chat", json.dumps(body).encode(), 10**6)
    assert codec.detokenize(request.parts[0].token_ids).endswith(f"<{DSML} calls>\n")
    assert request.unenforced


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}},
    ],
)
def test_listed_tools_are_never_refused_for_what_their_grammar_costs(
    request_json, say, codec, schema
):
    body = chat(codec)
    body["tools"][0]["function"]["parameters"] = schema
    reply = request_json(say("</think>hello"), "POST", "/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert "tools: calls are not held to their schemas" in reply.headers["warning"]
    strict = chat(codec)
    strict["tools"][0]["function"] |= {"strict": True, "parameters": schema}
    # what was asked for by name is refused, naming it, or held
    reply = request_json(say("</think>hello"), "POST", "/v1/chat/completions", json=strict)
    assert reply.status_code in (200, 400)
    if reply.status_code == 400:
        assert "tools" in json.dumps(reply.json())


def test_a_thread_is_refused_so_that_clients_send_the_history(request_json, say, codec):
    body = {
        "model": codec.model_names[0],
        "max_tokens": 9,
        "thread": {"type": "create"},
        "messages": [USER],
    }
    reply = request_json(say("x"), "POST", "/v1/messages", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_messages_answer_without_thinking_unless_asked(request_json, say, codec):
    body = {"model": codec.model_names[0], "max_tokens": 20, "messages": [USER]}
    plain = request_json(say("hello"), "POST", "/v1/messages", json=body).json()
    assert plain["content"] == [{"type": "text", "text": "hello"}]
    asked = {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    value = request_json(say("hm</think>hello"), "POST", "/v1/messages", json=asked).json()
    assert [block["type"] for block in value["content"]] == ["thinking", "text"]


@pytest.mark.parametrize(
    "switch",
    [
        {"chat_template_kwargs": {"thinking": False}},
        {"enable_thinking": False},
        {"reasoning": {"enabled": False}},
        {"thinking_budget": 0},
    ],
)
def test_switches_of_other_servers_end_thinking(request_json, say, codec, switch):
    body = {"model": codec.model_names[0], "messages": [USER], **switch}
    value = request_json(say("hello"), "POST", "/v1/chat/completions", json=body)
    assert value.json()["choices"][0]["message"]["content"] == "hello"
    assert "warning" not in value.headers


def test_fields_that_mean_nothing_are_named_and_counted(make_app, say, codec):
    import asyncio

    from httpx import ASGITransport, AsyncClient

    app, _, _ = make_app(say("</think>x"))
    body = {"model": codec.model_names[0], "messages": [USER], "wizardry": 1, "top_k": 4}

    async def go():
        async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as client:
            reply = await client.post("/v1/chat/completions", json=body)
            return reply, (await client.get("/metrics")).text

    reply, metrics = asyncio.run(go())
    assert reply.headers["warning"] == '299 deepinfer "ignored: wizardry"'
    assert 'deepinfer_request_unknown_fields_total{protocol="chat"} 1.0' in metrics


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_provider_tools_that_run_at_the_client_are_tools(request_json, say, codec, kind):
    body = {
        "model": codec.model_names[0],
        "max_tokens": 9,
        "messages": [USER],
        "tools": [{"type": kind, "name": "t"}],
    }
    assert request_json(say("x"), "POST", "/v1/messages", json=body).status_code == 200


def test_an_answer_to_a_forced_call_is_a_call(make_app, request_json, codec):
    script = Script([codec.tokenize(CALL), [1]])
    body = chat(codec, tool_choice="required", max_tokens=500)
    value = request_json(script, "POST", "/v1/chat/completions", json=body).json()
    [call] = value["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


@pytest.mark.parametrize("name", ["DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash", "gpt-9"])
def test_a_name_that_this_server_does_not_serve_is_404(request_json, say, codec, name):
    body = {"model": name, "messages": [USER]}
    assert request_json(say("x"), "POST", "/v1/chat/completions", json=body).status_code == 404
