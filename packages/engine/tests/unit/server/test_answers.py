"""Answers on the wire, without a client library in between."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from server_fakes import Script

from deepinfer_engine.errors import ConstraintError, EngineLost, EngineUnavailable

CHAT = {
    "model": "toy",
    "messages": [{"role": "user", "content": "hi"}],
    "thinking": {"type": "disabled"},
}
MESSAGES = {**CHAT, "max_tokens": 40}
SCHEMA = {"schema": {"type": "object"}}
BODIES = {"chat": CHAT, "messages": MESSAGES, "responses": {"model": "toy", "input": "hi"}}
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


def events_of(text: str) -> list[tuple[str | None, str]]:
    """(event name, data) of every server-sent event; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":")
        )
        if fields:
            found.append((fields.get("event"), fields["data"]))
    return found


@pytest.fixture
def ask(make_app):
    """`ask(protocol, script, **body)` gives (reply, engine)."""

    def send(protocol, script, *, settings=None, headers=None, **body):
        async def go():
            app, engine, _ = make_app(script, **(settings or {}))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                whole = {**BODIES[protocol], **body}
                reply = await client.post(PATHS[protocol], json=whole, headers=headers)
                return reply, engine

        return asyncio.run(go())

    return send


def test_a_whole_chat_answer_with_usage(ask, say):
    reply, engine = ask("chat", say("hello", cached=4))
    body = reply.json()
    prompt = len(engine.requests[0].token_ids)
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "toy")
    assert body["choices"][0]["message"]["content"] == "hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["prompt_tokens"] == prompt
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == prompt + 6
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert usage["prompt_cache_hit_tokens"] == 4
    assert usage["prompt_cache_miss_tokens"] == prompt - 4


def test_a_whole_messages_answer_counts_cached_tokens_apart(ask, say):
    reply, engine = ask("messages", say("hello", cached=4))
    body = reply.json()
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "end_turn")
    assert [block["text"] for block in body["content"] if block["type"] == "text"] == ["hello"]
    usage = body["usage"]
    assert usage["input_tokens"] == len(engine.requests[0].token_ids) - 4
    assert usage["cache_read_input_tokens"] == 4
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == 6


def test_a_chat_stream_is_the_same_answer_and_ends_with_done(ask, say):
    reply, _ = ask(
        "chat", say("hello", cached=4), stream=True, stream_options={"include_usage": True}
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    events = events_of(reply.text)
    assert events[-1] == (None, "[DONE]")
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "hello"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert chunks[-1]["usage"]["completion_tokens"] == 6


def test_no_usage_chunk_unless_asked_for(ask, say):
    reply, _ = ask("chat", say("hello"), stream=True)
    chunks = [json.loads(data) for _, data in events_of(reply.text)[:-1]]
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


def test_a_messages_stream_has_its_events_in_order(ask, say):
    reply, engine = ask("messages", say("hello", cached=4), stream=True)
    events = [(name, json.loads(data)) for name, data in events_of(reply.text)]
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events if name not in ("ping", "content_block_delta")]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]["usage"]
    assert start["input_tokens"] == len(engine.requests[0].token_ids) - 4
    assert start["cache_read_input_tokens"] == 4
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == "hello"
    delta = next(data for name, data in events if name == "message_delta")
    assert delta["delta"]["stop_reason"] == "end_turn"
    assert delta["usage"]["output_tokens"] == 6


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_a_character_split_over_tokens_arrives_whole(ask, say, size):
    text = "naïve 中文 🦊 ✓"
    reply, _ = ask("chat", say(text, size=size), stream=True)
    pieces = [
        json.loads(data)["choices"][0]["delta"].get("content") or ""
        for _, data in events_of(reply.text)[:-1]
    ]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("size", [1, 2, 4, 7, 50])
@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_a_stop_sequence_ends_the_answer_wherever_tokens_split(ask, say, protocol, size):
    field = "stop" if protocol == "chat" else "stop_sequences"
    script = say("one two END three", size=size)
    reply, engine = ask(protocol, script, **{field: ["END", "zzz"]})
    body = reply.json()
    if protocol == "chat":
        assert body["choices"][0]["message"]["content"] == "one two "
        assert body["choices"][0]["finish_reason"] == "stop"
        counted = body["usage"]["completion_tokens"]
    else:
        assert body["content"][-1]["text"] == "one two "
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
        counted = body["usage"]["output_tokens"]
    assert counted == len("one two END")
    assert engine.aborted == [engine.requests[0].request_id] or size == 50
    assert not engine.live


def test_text_that_may_begin_a_stop_sequence_is_held_back_and_then_released(ask, say):
    reply, _ = ask("chat", say("abEN", size=1), stream=True, stop=["END"])
    pieces = [
        json.loads(data)["choices"][0]["delta"].get("content") or ""
        for _, data in events_of(reply.text)[:-1]
    ]
    assert "".join(pieces) == "abEN"
    assert "E" not in pieces


def test_thinking_comes_apart_from_the_answer(ask, say):
    body = {"thinking": {"type": "enabled"}}
    reply, _ = ask("chat", say("let me see</think>42"), **body)
    message = reply.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("let me see", "42")
    assert reply.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    reply, _ = ask("messages", say("let me see</think>42"), **body)
    assert [(b["type"], b.get("thinking") or b.get("text")) for b in reply.json()["content"]] == [
        ("thinking", "let me see"),
        ("text", "42"),
    ]


def test_the_length_limit_is_told(ask, say):
    reply, engine = ask("chat", say("hello there"), max_tokens=4)
    assert engine.requests[0].sampling.max_tokens == 4
    assert reply.json()["choices"][0] == {**reply.json()["choices"][0], "finish_reason": "length"}
    reply, _ = ask("messages", say("hello there"), max_tokens=4)
    assert reply.json()["stop_reason"] == "max_tokens"


def test_sampling_fields_reach_the_engine(ask, say):
    _, engine = ask(
        "chat",
        say("x"),
        temperature=0,
        top_p=0.5,
        seed=7,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        logit_bias={"9": -1.5},
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=9,
        thinking={"type": "enabled"},
    )
    got = engine.requests[0].sampling
    assert (got.temperature, got.top_p, got.seed, got.top_k) == (0.0, 0.5, 7, 3)
    assert (got.min_p, got.repetition_penalty, got.min_tokens, got.ignore_eos) == (
        0.1,
        1.2,
        2,
        True,
    )
    assert (got.stop_token_ids, got.logit_bias) == ((5,), ((9, -1.5),))
    assert (got.presence_penalty, got.frequency_penalty) == (0.5, 0.25)
    assert (got.logprobs, got.max_tokens) == (2, 9)


def test_a_top_k_of_any_size_is_the_whole_vocabulary(ask, say):
    reply, engine = ask("chat", say("x"), top_k=2**80)
    assert reply.status_code == 200
    assert 0 < engine.requests[0].sampling.top_k < 2**31


def test_a_request_without_a_seed_gets_one(ask, say):
    _, engine = ask("chat", say("x"))
    assert engine.requests[0].sampling.seed == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 3),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [10**6]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 101}),
        ("n", 1000),
        ("seed", -1),
        ("max_tokens", 0),
        ("stop", [""]),
    ],
)
def test_a_field_out_of_range_is_400_and_named(ask, say, field, value):
    reply, engine = ask("chat", say("x"), **{field: value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert field in (error["param"] or "") or field in error["message"]
    assert not engine.requests


def test_fields_of_load_generators_are_accepted(ask, say):
    reply, _ = ask(
        "chat",
        say("x"),
        logprobs=None,
        ignore_eos=False,
        min_tokens=0,
        repetition_penalty=1.0,
        seed=1,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        unknown_field={"a": 1},
    )
    assert reply.status_code == 200


def test_logprobs_come_back(ask, say):
    reply, _ = ask("chat", say("ab", logprobs=True), logprobs=True, top_logprobs=1)
    entries = reply.json()["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["logprob"]) for e in entries] == [("a", -0.5), ("b", -0.5)]


def test_alternatives_beyond_the_tokenizer_are_left_out(ask, say):
    script = replace(say("ab", logprobs=True), unspelled=[510])
    reply, _ = ask("chat", script, logprobs=True, top_logprobs=2)
    assert reply.status_code == 200
    entries = reply.json()["choices"][0]["logprobs"]["content"]
    assert [[t["token"] for t in e["top_logprobs"]] for e in entries] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("body", "headers", "salt"),
    [
        ({}, {}, "anonymous"),
        ({"user_id": "u1"}, {}, "u1"),
        ({"user": "u2"}, {}, "u2"),
        ({}, {"x-api-key": "k"}, "alice"),
        ({"user_id": "u1"}, {"x-api-key": "k"}, "alice/u1"),
    ],
)
def test_the_cache_salt_is_user_then_key_then_anonymous(ask, say, tmp_path, body, headers, salt):
    settings = {}
    if headers:
        settings["api_key_file"] = tmp_path / "keys"
        settings["api_key_file"].write_text("alice:k\n")
    _, engine = ask("chat", say("x"), settings=settings, headers=headers, **body)
    assert engine.requests[0].salt == salt


def test_messages_names_its_user_in_metadata(ask, say):
    _, engine = ask("messages", say("x"), metadata={"user_id": "u3"})
    assert engine.requests[0].salt == "u3"


def test_a_user_id_of_more_than_512_bytes_is_400(ask, say):
    assert ask("chat", say("x"), user_id="ü" * 256)[0].status_code == 200
    assert ask("chat", say("x"), user_id="ü" * 257)[0].status_code == 400


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def test_requests_with_tools_are_agent_traffic(ask, say):
    _, engine = ask("chat", say("x"), tools=[TOOL])
    assert engine.requests[0].traffic_class == "agent"
    history = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    _, engine = ask("chat", say("x"), messages=history)
    assert engine.requests[0].traffic_class == "agent"
    _, engine = ask("chat", say("x"))
    assert engine.requests[0].traffic_class == "chat"


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_before_the_first_token_is_a_plain_http_error(ask, protocol, stream):
    script = Script([[65]], raise_at=(0, EngineUnavailable("all workers are busy", 3)))
    reply, _ = ask(protocol, script, stream=stream)
    assert reply.status_code == (503 if protocol == "chat" else 529)
    assert reply.headers["retry-after"] == "3"
    assert reply.json()["error"]["message"] == "all workers are busy"


def test_an_error_in_a_chat_stream_is_an_event_and_no_done_follows(ask, codec):
    script = Script([codec.tokenize("abc")] * 2, raise_at=(1, EngineLost("the decode worker died")))
    reply, _ = ask("chat", script, stream=True)
    assert reply.status_code == 200
    events = events_of(reply.text)
    assert json.loads(events[-1][1])["error"]["message"] == "the decode worker died"
    assert (None, "[DONE]") not in events


def test_an_error_in_a_messages_stream_is_an_error_event(ask, codec):
    script = Script([codec.tokenize("abc")] * 2, raise_at=(1, EngineLost("the decode worker died")))
    reply, _ = ask("messages", script, stream=True)
    name, data = events_of(reply.text)[-1]
    assert name == "error"
    assert json.loads(data)["error"] == {"type": "api_error", "message": "the decode worker died"}
    assert "message_stop" not in reply.text


def test_an_error_in_the_middle_of_a_whole_answer_is_an_http_error(ask, codec):
    script = Script([codec.tokenize("abc")] * 2, raise_at=(1, EngineLost("gone")))
    assert ask("chat", script)[0].status_code == 500


@pytest.mark.parametrize("reason", [None, "error", "abort"])
def test_a_generation_that_does_not_end_properly_is_an_error_and_not_an_answer(ask, codec, reason):
    script = Script([codec.tokenize("abc")], reason=reason)
    assert ask("chat", script)[0].status_code == 500
    streamed, _ = ask("chat", script, stream=True)
    assert (None, "[DONE]") not in events_of(streamed.text)


def test_a_stop_token_ends_the_answer_unspelled_and_is_counted(ask, codec):
    ids = codec.tokenize("abc")
    reply, _ = ask("chat", Script([ids]), stop_token_ids=[ids[-1]])
    body = reply.json()
    assert body["choices"][0]["message"]["content"] == "ab"
    assert body["usage"]["completion_tokens"] == 3


def test_running_out_of_cache_memory_is_deepseeks_finish_reason_in_chat(ask, codec):
    script = Script([codec.tokenize("abc")], reason="insufficient_system_resource")
    reply, _ = ask("chat", script)
    choice = reply.json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == (
        "insufficient_system_resource",
        "abc",
    )
    reply, _ = ask("chat", script, stream=True)
    assert '"finish_reason":"insufficient_system_resource"' in reply.text
    reply, _ = ask("messages", script, stream=True)
    assert '"type":"overloaded_error"' in reply.text


def test_a_drained_server_says_so(make_app, say):
    async def go():
        app, _, _ = make_app(say("x"))
        app.state.services.gate.draining = True
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return await client.post(PATHS["chat"], json=CHAT)

    reply = asyncio.run(go())
    assert reply.status_code == 503
    assert reply.headers["connection"] == "close"
    assert reply.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "999999999999", "9" * 5000])
def test_a_broken_request_timeout_is_400(ask, say, value):
    reply, _ = ask("chat", say("x"), headers={"x-request-timeout-ms": value})
    assert reply.status_code == 400


@pytest.mark.parametrize(
    ("protocol", "fields", "param"),
    [
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **SCHEMA}}},
            "response_format",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "n", **SCHEMA}}},
            "text.format",
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", **SCHEMA}}},
            "output_config.format",
        ),
        (
            "messages",
            {"tools": [{"name": "t", "input_schema": {"type": "object"}, "strict": True}]},
            "tools",
        ),
    ],
)
def test_a_schema_that_a_worker_refuses_names_its_field(ask, protocol, fields, param):
    script = Script([[1]], raise_at=(0, ConstraintError("no such expression")))
    reply, _ = ask(protocol, script, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert "no such expression" in error["message"]
    assert param in (error["message"] if protocol == "messages" else error["param"] or "")


def test_a_request_that_the_engine_timed_out_is_504(ask, codec):
    script = Script([codec.tokenize("abc")], reason="abort")
    reply, _ = ask("chat", script, headers={"x-request-timeout-ms": "60000"})
    assert reply.status_code == 504
    assert "60 s" in reply.json()["error"]["message"]


def test_the_request_timeout_reaches_the_engine(ask, say):
    _, engine = ask("chat", say("x"), headers={"x-request-timeout-ms": "1500"})
    assert engine.requests[0].timeout_s == 1.5
