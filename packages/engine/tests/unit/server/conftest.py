"""Fixtures of the server's tests: an application over a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from server_fakes import EOS, FakeClock, FakeEngine, Script, byte_codec

from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings


@pytest.fixture
def codec():
    return byte_codec()


@pytest.fixture
def say(codec) -> Callable[..., Script]:
    """A script that speaks a text in steps of `size` tokens and ends it with EOS."""

    def build(text: str, *, size: int = 3, eos: bool = True, **more: object) -> Script:
        ids = codec.tokenize(text)
        if eos:
            ids += [EOS]
        return Script([ids[i : i + size] for i in range(0, len(ids), size)], **more)

    return build


@pytest.fixture
def make_app(codec):
    """`make_app(script, **settings)` gives (app, engine, clock)."""

    def build(script, **settings):
        engine, clock = FakeEngine(script), FakeClock()
        app = create_app(
            engine, codec, Settings(**settings), clock=clock, wall=lambda: 1_700_000_000.0
        )
        return app, engine, clock

    return build


def in_memory(app) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
def request_json(make_app):
    """`request_json(script, method, path, json=..., **settings)`: one request, in memory."""

    def send(script, method, path, *, settings=None, **kwargs) -> httpx.Response:
        async def go():
            app, _, _ = make_app(script, **(settings or {}))
            async with in_memory(app) as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(go())

    return send
