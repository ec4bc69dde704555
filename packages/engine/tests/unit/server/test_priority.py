"""`priority` and `coupled` reach the engine; who may step forward is the operator's to say."""

from __future__ import annotations

import asyncio

import pytest
from httpx import ASGITransport, AsyncClient

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def body(path, model, **fields):
    what = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return {"model": model, **what, **fields}


def post(app, path, value):
    async def go():
        async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, json=value)

    return asyncio.run(go())


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_both_reach_the_engine(make_app, codec, say, path):
    app, engine, _ = make_app(say("x"))
    value = body(path, codec.model_names[0], priority=3, coupled=True)
    reply = post(app, path, value)
    assert reply.status_code == 200
    assert "warning" not in reply.headers
    sampling = engine.requests[0].sampling
    assert (sampling.priority, sampling.coupled) == (3, True)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_nobody_steps_forward_unless_the_operator_lets_them(make_app, codec, say, path):
    app, engine, _ = make_app(say("x"))
    reply = post(app, path, body(path, codec.model_names[0], priority=-1))
    assert reply.status_code == 400
    assert "--priorities" in reply.json()["error"]["message"]
    assert not engine.requests
    app, engine, _ = make_app(say("x"), priorities=True)
    assert post(app, path, body(path, codec.model_names[0], priority=-1)).status_code == 200
    assert engine.requests[0].sampling.priority == -1


@pytest.mark.parametrize("wrong", [1.5, "high", 1 << 40])
def test_a_priority_is_an_integer(make_app, codec, say, wrong):
    app, _, _ = make_app(say("x"))
    reply = post(app, CHAT, body(CHAT, codec.model_names[0], priority=wrong))
    assert reply.status_code == 400
    assert "priority" in reply.json()["error"]["message"]
