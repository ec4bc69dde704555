"""In which order a request is looked at: the key first, a place last."""

from __future__ import annotations

import asyncio

import pytest
from server_fakes import FakeEngine, Script, byte_codec

from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

POSTS = [
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions",
    "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize",
    "/admin/flush",
]  # fmt: skip


async def answer(app, path, receive, headers=()):
    """Status of one request whose body comes from `receive`."""
    status = []

    async def send(message):
        if message["type"] == "http.response.start":
            status.append(message["status"])

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("localhost", 80), "state": {},
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers],
    }  # fmt: skip
    await app(scope, receive, send)
    return status[0]


def app_with_keys(tmp_path):
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("s3cret-of-somebody\n")
    admin.write_text("s3cret-of-the-admin\n")
    settings = Settings(api_key_file=keys, admin_key_file=admin)
    return create_app(FakeEngine(Script()), byte_codec(), settings)


@pytest.mark.parametrize("key", [None, b"Bearer wrong"])
@pytest.mark.parametrize("path", POSTS)
def test_a_wrong_key_is_told_before_any_of_the_body_is_read(tmp_path, path, key):
    async def receive():
        raise AssertionError("the body was read before the key")

    async def body():
        app = app_with_keys(tmp_path)
        headers = [(b"content-length", b"1000000")]
        headers += [] if key is None else [(b"authorization", key)]
        assert await answer(app, path, receive, headers) in (401, 403)
        app.state.services.close()

    asyncio.run(body())


@pytest.mark.parametrize("path", POSTS[:-1])
def test_no_place_is_held_while_a_body_comes(tmp_path, path):
    async def body():
        app = app_with_keys(tmp_path)
        services = app.state.services
        parts, waits = asyncio.Queue(), asyncio.Event()

        async def receive():
            waits.set()
            return await parts.get()

        headers = [(b"authorization", b"Bearer s3cret-of-somebody")]
        asking = asyncio.create_task(answer(app, path, receive, headers))
        for part in (b"{", b'"model": '):
            await waits.wait()
            assert services.gate.in_flight == 0
            waits.clear()
            parts.put_nowait({"type": "http.request", "body": part, "more_body": True})
        await waits.wait()
        assert services.gate.in_flight == 0
        assert services.bodies.held == len('{"model": ')
        parts.put_nowait({"type": "http.disconnect"})
        await asyncio.gather(asking, return_exceptions=True)
        assert services.bodies.held == 0
        services.close()

    asyncio.run(body())
