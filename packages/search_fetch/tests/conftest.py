from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from service_harness import FAST, Service

from deepinfer_search_fetch import AsyncSearchFetch, Config
from deepinfer_search_fetch.errors import UpstreamError
from deepinfer_search_fetch.service.settings import ServiceSettings

SITE_ADDRESS = "127.0.0.2"  # plays the public internet; 127.0.0.1 stays forbidden


class ScriptedResolver:
    """Answers from a table and counts the look-ups of each name."""

    def __init__(self, table: dict[str, list[list[str]]]) -> None:
        self.table = table
        self.lookups: dict[str, int] = {}

    async def resolve(self, host: str) -> list[str]:
        n = self.lookups.get(host, 0)
        self.lookups[host] = n + 1
        answers = self.table.get(host)
        if not answers:
            raise UpstreamError("dns_failure", "the host name does not resolve")
        return answers[min(n, len(answers) - 1)]


@dataclass
class Listener:
    """A raw TCP server on loopback that answers each connection with scripted bytes."""

    port: int
    requests: list[bytes] = field(default_factory=list)
    pages: dict[str, bytes] = field(default_factory=dict)
    behaviour: Callable[[socket.socket, bytes], None] | None = None

    def page(
        self,
        path: str,
        body: bytes | str,
        *,
        status: str = "200 OK",
        content_type: str | None = "text/html; charset=utf-8",
        headers: tuple[str, ...] = (),
    ) -> None:
        body = body.encode() if isinstance(body, str) else body
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *headers,
        ]
        if content_type:
            lines.append(f"Content-Type: {content_type}")
        self.pages[path] = "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def paths(self) -> list[str]:
        return [r.split(b" ", 2)[1].decode() for r in self.requests if b" " in r]


def start_listener(address: str) -> tuple[Listener, Callable[[], None]]:
    server = socket.create_server((address, 0))
    server.settimeout(0.1)
    listener = Listener(server.getsockname()[1])
    stop = threading.Event()

    def handle(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(60)
            data = b""
            try:
                while b"\r\n\r\n" not in data:
                    chunk = connection.recv(65536)
                    if not chunk:
                        break
                    data += chunk
                listener.requests.append(data)
                if listener.behaviour is not None:
                    listener.behaviour(connection, data)
                    return
                path = (data.split(b" ", 2) + [b""] * 2)[1].decode("latin-1")
                missing = (
                    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                connection.sendall(listener.pages.get(path, missing))
            except OSError:
                return

    def accept() -> None:
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                continue
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()

    def close() -> None:
        stop.set()
        thread.join()
        server.close()

    return listener, close


@pytest.fixture
def make_resolver() -> type[ScriptedResolver]:
    return ScriptedResolver


@pytest.fixture
def site() -> Iterator[Listener]:
    """The "public" site at 127.0.0.2, which tests allow."""
    listener, close = start_listener(SITE_ADDRESS)
    yield listener
    close()


@pytest.fixture
def target() -> Iterator[Listener]:
    """A private service at 127.0.0.1; the test fails if anything connects to it."""
    listener, close = start_listener("127.0.0.1")
    yield listener
    close()
    assert listener.requests == [], "the forbidden service was reached"


@pytest.fixture
def config(tmp_path: Path, site: Listener) -> Config:
    return Config(
        home=tmp_path / "home",
        allow_cidrs=(f"{SITE_ADDRESS}/32",),
        ports=(80, 443, 8080, 8443, site.port),
        extract_workers=0,
        host_requests_per_second=1000.0,
        host_burst=1000,
        robots="ignore",
    )


@pytest.fixture
def serve(config: Config) -> Iterator[Callable[..., Service]]:
    """Make services with a one-page index; `public.test` is the site fixture."""
    made: list[Service] = []

    def make(*, auth: bool = False, settings: ServiceSettings = FAST) -> Service:
        resolver = ScriptedResolver({"public.test": [[SITE_ADDRESS]]})
        made.append(Service(config, resolver, settings, auth=auth))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.fixture
def make_client() -> Iterator[Callable[..., AsyncSearchFetch]]:
    made: list[AsyncSearchFetch] = []

    def make(config: Config, table: dict[str, list[list[str]]] | None = None) -> AsyncSearchFetch:
        resolver = ScriptedResolver({"public.test": [[SITE_ADDRESS]], **(table or {})})
        client = AsyncSearchFetch(config, resolver=resolver)
        made.append(client)
        return client

    yield make

    async def close() -> None:
        for client in made:
            await client.close()

    asyncio.run(close())
