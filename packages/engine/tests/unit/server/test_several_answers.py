"""`n` answers to one conversation, and the words for a conversation that does not fit."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from httpx import ASGITransport, AsyncClient
from server_fakes import Script

CHAT = "/v1/chat/completions"


def chat(codec, **fields):
    message = {"role": "user", "content": "hi"}
    off = {"thinking": {"type": "disabled"}}
    return {"model": codec.model_names[0], "messages": [message], **off, **fields}


def by_seed(codec):
    """An engine whose answers tell their seeds."""

    def speak(request):
        ids = codec.tokenize(f"seed {request.sampling.seed}")
        return Script([ids[i : i + 2] for i in range(0, len(ids), 2)] + [[1]])

    return speak


def test_n_answers_come_in_one_body_with_their_own_seeds(request_json, codec):
    value = request_json(by_seed(codec), "POST", CHAT, json=chat(codec, n=3, seed=7)).json()
    texts = [(c["index"], c["message"]["content"]) for c in value["choices"]]
    assert texts == [(0, "seed 7"), (1, "seed 8"), (2, "seed 9")]
    assert value["usage"]["completion_tokens"] == 3 * 7


def test_n_answers_stream_side_by_side_and_end_once(request_json, codec):
    fields = {"n": 2, "seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    reply = request_json(by_seed(codec), "POST", CHAT, json=chat(codec, **fields))
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    texts, reasons, usages = ["", ""], [], []
    for line in lines[:-1]:
        value = json.loads(line)
        usages += [value["usage"]] if value.get("usage") else []
        for choice in value["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == ["seed 1", "seed 2"]
    assert reasons == ["stop", "stop"]
    assert len(usages) == 1


def test_a_failure_of_one_answer_ends_them_all(make_app, codec):
    def speak(request):
        if request.sampling.seed == 6:
            return Script([codec.tokenize("a")], raise_at=(1, RuntimeError("broken")))
        return Script([codec.tokenize("b")] * 3, gates={1: asyncio.Event()})  # never opens

    app, engine, _ = make_app(speak)

    async def go():
        async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(CHAT, json=chat(codec, n=3, seed=5))

    reply = asyncio.run(go())
    assert reply.status_code == 500
    assert engine.live == set()
    assert len(engine.aborted) == 3


@pytest.mark.parametrize(
    ("path", "fields", "pattern"),
    [
        (
            "/v1/messages",
            {"max_tokens": 5},
            r"^prompt is too long: (\d+) tokens > 4095 maximum$",
        ),
        (
            CHAT,
            {},
            r"^This model's maximum context length is 4096 tokens\. However, you requested \d+ "
            r"tokens \((\d+) in the messages, 1 in the completion\)\.",
        ),
    ],
)
def test_a_prompt_over_the_context_is_refused_as_clients_parse_it(
    request_json, say, codec, path, fields, pattern
):
    message = {"role": "user", "content": "x" * 6000}
    body = {"model": codec.model_names[0], "messages": [message], **fields}
    reply = request_json(say("x"), "POST", path, json=body)
    assert reply.status_code == 400
    found = re.search(pattern, reply.json()["error"]["message"])
    assert found, reply.json()
    assert int(found[1]) > 6000


def test_an_answer_over_the_context_is_refused_as_messages_clients_parse_it(
    request_json, say, codec
):
    message = {"role": "user", "content": "x"}
    body = {"model": codec.model_names[0], "messages": [message], "max_tokens": 4096}
    reply = request_json(say("x"), "POST", "/v1/messages", json=body)
    assert reply.status_code == 400
    assert re.match(
        r"input length and `max_tokens` exceed context limit: \d+ \+ 4096 > 4096",
        reply.json()["error"]["message"],
    )
