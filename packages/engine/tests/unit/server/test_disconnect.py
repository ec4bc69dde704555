"""Clients that leave, on a real socket: the engine hears of it at once, streaming or not."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from server_fakes import FakeEngine, Script
from server_socket import serving

from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}


class Held:
    """An engine that answers one step and then waits, and says when it was closed."""

    def __init__(self, codec) -> None:
        self.codec = codec
        self.engine: FakeEngine
        self.stepped = None
        self.closed = None

    def build(self):
        self.closed, self.stepped = asyncio.Event(), asyncio.Event()
        script = Script([self.codec.tokenize("ab")] * 2, gates={1: asyncio.Event()})
        self.engine = FakeEngine(script)
        inner = self.engine.generate

        async def generate(request):
            try:
                async for event in inner(request):
                    yield event
                    self.stepped.set()
            finally:
                self.closed.set()

        self.engine.generate = generate
        return create_app(self.engine, self.codec, Settings())


def post(url: str, path: str, body: dict) -> socket.socket:
    """Send a request on a bare socket and leave the answer unread."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    sock = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_socket_aborts_the_generation(codec, protocol, stream):
    held = Held(codec)
    body = {
        "model": "toy",
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "x"}],
        "stream": stream,
    }
    with serving(held.build) as server:
        sock = post(server.url, PATHS[protocol], body)
        if stream:
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
        server.call(asyncio.wait_for(held.stepped.wait(), 10))
        assert held.engine.live
        sock.close()
        server.call(asyncio.wait_for(held.closed.wait(), 10))
        services = server.app.state.services
        server.call(services.gate.drain(10))
        assert not held.engine.live
        assert services.gate.in_flight == 0
        text = services.metrics.render([], "")[0].decode()
    assert f'deepinfer_aborts_total{{cause="disconnect",protocol="{protocol}"}} 1.0' in text
    assert "deepinfer_http_requests_in_flight 0.0" in text


def test_draining_lets_a_running_answer_finish(codec):
    held = Held(codec)
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "x"}],
        "thinking": {"type": "disabled"},
    }
    with serving(held.build) as server:
        sock = post(server.url, PATHS["chat"], body)
        server.call(asyncio.wait_for(held.stepped.wait(), 10))
        drained = asyncio.run_coroutine_threadsafe(
            server.app.state.services.gate.drain(10), server._loop
        )
        server._loop.call_soon_threadsafe(held.engine.script.gates[1].set)
        assert drained.result(60) is True
        answer = sock.recv(4000)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        sock.close()


def test_a_body_over_the_limit_still_gets_its_answer_through(codec):
    """The refusal must not be lost to a connection reset while the client is still sending."""

    def build():
        return create_app(FakeEngine(Script()), codec, Settings(max_body_bytes=1024))

    with serving(build) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            head = f"POST {PATHS['chat']} HTTP/1.1\r\nHost: localhost\r\n".encode()
            head += b"Transfer-Encoding: chunked\r\n\r\n"
            sock.sendall(
                head
                + b"400\r\n"
                + b"x" * 1024
                + b"\r\n"
                + b"200\r\n"
                + b"x" * 512
                + b"\r\n0\r\n\r\n"
            )
            assert sock.recv(12) == b"HTTP/1.1 413"


def test_a_refused_key_is_told_even_to_a_client_with_megabytes_to_send(codec, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("s3cret\n")

    def build():
        return create_app(FakeEngine(Script()), codec, Settings(api_key_file=keys))

    size = 8 << 20
    with serving(build) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            head = f"POST {PATHS['chat']} HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Length: {size}\r\n\r\n"
            sock.sendall(head.encode() + b"x" * size)
            assert sock.recv(12) == b"HTTP/1.1 401"
