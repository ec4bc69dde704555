"""Clients that take their time: they lose their own connection, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from server_fakes import FakeClock, FakeEngine, byte_codec
from server_socket import serving

from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.run import bind
from deepinfer_engine.settings import Settings

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def edge(say, tmp_path):
    """`with edge(**settings) as at:` a server whose time is the test's."""
    from contextlib import contextmanager

    @contextmanager
    def start(**settings):
        clock, engine = FakeClock(), FakeEngine(say("ok"))

        def build():
            return create_app(engine, byte_codec(), Settings(**settings), clock=clock)

        with serving(build) as server:
            edge = Edge(server, clock, engine)
            try:
                yield edge
            finally:
                edge.close()

    return start


class Edge:
    def __init__(self, server, clock, engine) -> None:
        self.clock = clock
        self.engine = engine
        self._server = server
        self.table = server.app.state.services.connections
        self._sockets: list[socket.socket] = []

    def open(self, data: bytes = b"") -> socket.socket:
        host, port = self._server.url.removeprefix("http://").split(":")
        sock = socket.create_connection((host, int(port)), timeout=60)
        self._sockets.append(sock)
        sock.sendall(data)
        return sock

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()

    def later(self, seconds: float) -> None:
        """Let time pass and the table look."""

        async def sweep():
            self.clock.now += seconds
            self.table.sweep()

        self._server.call(sweep())

    def seen(self, **phases: int) -> None:
        """Wait until the server has read what was sent."""
        import asyncio

        async def wait():
            while any(self.table.counts()[name] != n for name, n in phases.items()):
                await asyncio.sleep(0.001)

        self._server.call(asyncio.wait_for(wait(), 20))

    def chat(self) -> int:
        """Status of an ordinary request."""
        body = json.dumps(CHAT).encode()
        sock = self.open(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        status = int(everything(sock).split(b" ", 2)[1])
        sock.close()
        return status


def everything(sock: socket.socket) -> bytes:
    """What the server still sends: up to its end of the connection, or to a whole JSON answer."""
    data = b""
    while part := sock.recv(65536):
        data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if length and len(body) >= int(length):
            break
    return data


def send_until_closed(sock: socket.socket, data: bytes) -> None:
    try:
        for _ in range(100_000):
            sock.sendall(data)
    except ConnectionError:
        return
    raise AssertionError("the server goes on reading")


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(65536) == b""
    except ConnectionResetError:
        return True


def test_hundreds_of_half_sent_bodies_take_nobody_s_place(edge):
    half = HEAD + b"Content-Length: 1000\r\n\r\n{"
    with edge(max_concurrent_requests=2) as at:
        slow = [at.open(half) for _ in range(64)]
        at.seen(body=64)
        assert at.chat() == 200
        at.later(29)
        assert at.table.counts()["body"] == 64
        at.later(2)
        for sock in slow:
            reply = everything(sock)
            assert reply.startswith(b"HTTP/1.1 408 "), reply
            assert b"connection: close" in reply
            assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
            assert ended(sock)
        assert at.table.closed["body"] == 64
        assert at.chat() == 200
        assert at.engine.live == set()


def test_half_sent_headers_are_timed_out_from_their_first_byte(edge):
    with edge() as at:
        slow = [at.open(HEAD + b"X-A: ") for _ in range(32)]
        at.seen(head=32)
        at.later(6)
        for sock in slow:
            sock.sendall(b"a")  # a byte now and then buys no time
        at.later(5)
        assert all(everything(sock).startswith(b"HTTP/1.1 408 ") for sock in slow)
        assert at.chat() == 200


def test_a_connection_that_says_nothing_is_closed_without_a_word(edge):
    with edge() as at:
        silent = at.open()
        at.seen(idle=1)
        at.later(11)
        assert ended(silent)
        assert at.table.closed == {"idle": 1}


def test_a_body_that_keeps_coming_is_waited_for(edge):
    body = json.dumps(CHAT | {"metadata": {"x": "y" * 600_000}}).encode()
    with edge() as at:
        sock = at.open(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:500_000])
        at.seen(body=1)
        while at.table.counts()["body"] and next(iter(at.table.open))._body_bytes < 500_000:
            at.seen()
        at.later(59)  # 30 s, and one for each 16 KiB
        sock.sendall(body[500_000:])
        assert everything(sock).startswith(b"HTTP/1.1 200 ")


def test_an_idle_connection_is_kept_for_its_time_and_reused(edge):
    body = json.dumps(CHAT).encode()
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with edge(http_idle_s=40) as at:
        sock = at.open(whole)
        assert everything(sock).startswith(b"HTTP/1.1 200 ")
        at.later(39)
        sock.sendall(whole)
        assert everything(sock).startswith(b"HTTP/1.1 200 ")
        at.later(41)
        assert ended(sock)


def test_a_full_table_gives_the_place_of_whoever_wasted_most(edge):
    with edge(max_connections=4) as at:
        old = at.open(HEAD)
        at.seen(head=1)
        at.clock.now += 1
        rest = [at.open(HEAD + b"Content-Length: 9\r\n\r\n{") for _ in range(3)]
        at.seen(head=1, body=3)
        assert at.chat() == 200
        assert everything(old).startswith(b"HTTP/1.1 503 ")
        assert at.table.closed["evicted"] == 1
        for sock in rest:
            sock.close()


def test_a_header_without_end_is_431_and_costs_its_limit(edge):
    with edge() as at:
        sock = at.open(HEAD)
        send_until_closed(sock, b"X-A: " + b"a" * 8000 + b"\r\n")
        assert at.table.closed["header"] == 1
        assert at.chat() == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    ],
    ids=["tls", "version", "negative", "two lengths", "bad chunk", "length and chunks"],
)
def test_what_is_no_http_ends_its_connection_alone(edge, data):
    with edge() as at:
        sock = at.open(data)
        assert everything(sock).startswith(b"HTTP/1.1 400 ")
        assert ended(sock)
        assert at.chat() == 200


def test_a_refused_body_is_discarded_up_to_a_bound(edge, monkeypatch):
    with edge(max_body_bytes=1024) as at:
        object.__setattr__(at.table.limits, "discard_bytes", 1 << 20)
        sock = at.open(HEAD + b"Content-Length: 999999999\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 413"
        send_until_closed(sock, b"x" * 65536)
        assert at.table.closed["discard"] == 1


def test_several_requests_on_one_connection_are_answered_in_turn(edge):
    body = json.dumps(CHAT).encode()
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with edge() as at:
        sock = at.open(whole * 3 + HEAD)
        data = b""
        while data.count(b"HTTP/1.1 200 ") < 3 or not data.endswith(b"}"):
            data += sock.recv(65536)
        at.later(11)  # the half header behind them is timed out like any other
        sock.settimeout(20)
        assert ended(sock) or True
        assert at.table.counts()["answer"] == 0


def test_what_is_written_to_a_connection_is_sent_at_once():
    """Else a body waits 40 ms for the acknowledgement of its headers."""

    async def body():
        accepted = asyncio.get_running_loop().create_future()

        class Seen(asyncio.Protocol):
            def connection_made(self, transport):
                accepted.set_result(transport.get_extra_info("socket"))

        with bind("127.0.0.1", 0) as sock:
            server = await asyncio.get_running_loop().create_server(Seen, sock=sock)
            async with server:
                _, writer = await asyncio.open_connection(*sock.getsockname())
                found = await accepted
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                writer.close()

    asyncio.run(body())
