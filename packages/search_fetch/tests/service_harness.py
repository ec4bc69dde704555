"""The service on a loopback port, and a plain HTTP client that shows every byte's fate."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn

from deepinfer_search_fetch import AsyncSearchFetch, Config
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.service.app import create_app
from deepinfer_search_fetch.service.auth import KeyStore
from deepinfer_search_fetch.service.metering import Ledger
from deepinfer_search_fetch.service.run import server_config
from deepinfer_search_fetch.service.settings import ServiceSettings

FAST = ServiceSettings(rate_per_second=1e6, rate_burst=10**6, connections_per_second=1e6)


@dataclass(frozen=True)
class Reply:
    """One answer as the client saw it; `whole` is false when the connection ended before it did."""

    status: int
    headers: dict[str, str]
    content: bytes
    whole: bool

    @property
    def json(self) -> Any:
        return json.loads(self.content)


def request_bytes(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """A whole HTTP request; `_` in header names stands for `-`."""
    client = h11.Connection(h11.CLIENT)
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Connection": "close",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    if "Transfer-Encoding" not in fields:
        fields.setdefault("Content-Length", str(len(data)))
    first = client.send(h11.Request(method=method, target=path, headers=list(fields.items())))
    rest = client.send(h11.Data(data=data)) if data else b""
    return (first or b"") + (rest or b"") + (client.send(h11.EndOfMessage()) or b"")


def read_reply(connection: socket.socket) -> Reply:
    """Read until the answer ends, or the connection does."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    status, headers, parts, whole = 0, {}, [], False
    try:
        while True:
            event = client.next_event()
            if event is h11.NEED_DATA:
                client.receive_data(connection.recv(65536))
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {k.decode(): v.decode() for k, v in event.headers}
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            else:
                whole = isinstance(event, h11.EndOfMessage)
                break
    except (OSError, h11.RemoteProtocolError):
        whole = False
    return Reply(status, headers, b"".join(parts), whole)


def call(port: int, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    """One request on a connection of its own. Raises OSError when nobody listens."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(request_bytes(method, path, body, **headers))
        return read_reply(connection)


class Service:
    """The application served by uvicorn in a thread; `client` and `ledger` are reachable."""

    def __init__(
        self, config: Config, resolver: Any, settings: ServiceSettings, *, auth: bool
    ) -> None:
        config.home.mkdir(parents=True, exist_ok=True)
        self.keys = KeyStore(config.home / "keys.sqlite3") if auth else None
        self.ledger = Ledger(config.home / "ledger.sqlite3", settings.prices)
        self.client = AsyncSearchFetch(config, resolver=resolver)
        self.client.backend.index(
            [IndexedPage("https://a.example/", "Voles", "Voles live in grass. " * 20, "2026-01-01")]
        )
        self.client.backend.commit()
        self.app = create_app(self.client, self.ledger, self.keys, settings)
        sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = sock.getsockname()[1]
        ready = threading.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        class Server(uvicorn.Server):
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                loops.append(asyncio.get_running_loop())
                ready.set()

        self.server = Server(server_config(self.app, settings))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]})
        self.thread.start()
        assert ready.wait(30), "the service did not start"
        self.loop = loops[0]

    def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        reply = call(self.port, method, path, body, **headers)
        kind = reply.headers.get("content-type", "")
        is_json = kind.startswith("application/json")
        return reply.status, reply.headers, reply.json if is_json else reply.content.decode()

    def billed(self) -> dict[str, int]:
        """Quantity by endpoint."""
        return {str(r["endpoint"]): int(r["quantity"]) for r in self.ledger.usage()}

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.ledger.close()
        if self.keys:
            self.keys.close()
