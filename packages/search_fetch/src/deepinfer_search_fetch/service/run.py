"""Running the service on a socket: one writer a home folder, flushed writes, a bounded shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from types import FrameType
from typing import ClassVar

import filelock
import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.database import private_folder
from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.service.app import create_app
from deepinfer_search_fetch.service.auth import KeyStore
from deepinfer_search_fetch.service.delivery import new_request_id
from deepinfer_search_fetch.service.metering import Ledger
from deepinfer_search_fetch.service.problems import problem
from deepinfer_search_fetch.service.ratelimit import ConnectionPace
from deepinfer_search_fetch.service.settings import ServiceSettings

log = logging.getLogger("deepinfer_search_fetch.service")
LEDGER_FILE = "ledger.sqlite3"
# The event loop gets its turn back from threads that search or decode within this time.
_SWITCH_SECONDS = 0.0005
KEYS_FILE = "keys.sqlite3"


class FlushingProtocol(H11Protocol):
    """HTTP/1.1 whose `send` waits while anything is left in this process: an answer counts as sent
    when the kernel has it, not when a buffer of ours has.

    A connection without a request gives its place up: after `header_seconds`, or at once when
    `max_connections` are open and another one comes. A peer that takes no bytes for
    `answer_seconds` is cut off by the kernel.
    """

    settings = ServiceSettings()
    pace = ConnectionPace(settings.connections_per_second)
    waiting: ClassVar[dict[FlushingProtocol, None]] = {}
    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            milliseconds = int(self.settings.answer_seconds * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        if len(self.connections) > self.settings.max_connections:
            oldest = next(iter(self.waiting), self)
            oldest.transport.abort()
        self._wait_for_request()
        self._keep_pace()

    def _keep_pace(self) -> None:
        """Read nothing of a connection whose address opens too many, until its turn comes."""
        seconds = self.pace.wait(self.client[0] if self.client else "")
        if seconds is None:
            self.transport.abort()
        elif seconds > 0:
            self.transport.pause_reading()
            self.loop.call_later(seconds, self._begin_reading)

    def _begin_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._at_work():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._at_work():
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _at_work(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _wait_for_request(self) -> None:
        self._stop_waiting()
        self.waiting[self] = None
        self._overdue = self.loop.call_later(self.settings.header_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the error body of every route too, and the connection ends."""
        request_id = new_request_id()
        error = InvalidRequestError(
            "invalid_argument", f"not a valid HTTP/1.1 request: {msg}", http_status=400
        )
        extra = {"X-Request-Id": request_id, "Cache-Control": "no-store", "Connection": "close"}
        answer = problem(request_id, error, extra)
        for event in (
            h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn whose later collections leave out what stands when the service is up: a full one of
    that takes 50 ms, in which no thread does anything."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        gc.collect()
        gc.freeze()


def server_config(app: ASGIApp, settings: ServiceSettings) -> uvicorn.Config:
    """uvicorn as this service needs it."""
    pace = ConnectionPace(settings.connections_per_second)
    own = {"settings": settings, "waiting": {}, "pace": pace}
    protocol = type("Protocol", (FlushingProtocol,), own)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InvalidRequestError with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise InvalidRequestError(
            "invalid_argument", f"cannot listen on {host}:{port}: {error}; choose another --port"
        ) from None
    # Inherited by what it accepts; asyncio sets it only where the socket names its protocol.
    # Without it an answer on a connection in use waits 40 ms between its headers and its body.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def run_service(
    config: Config, settings: ServiceSettings, host: str, port: int, *, with_keys: bool
) -> None:
    """Serve until SIGTERM or SIGINT; running requests have `shutdown_seconds`, then get a 503.

    Raises InvalidRequestError when the port or the home folder is in use.
    """
    private_folder(config.home)
    sock = bind(host, port)
    lock = filelock.FileLock(config.home / "service.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        sock.close()
        raise InvalidRequestError(
            "invalid_argument", f"another service uses {config.home}; give this one its own --home"
        ) from None
    with lock:
        ledger = Ledger(config.home / LEDGER_FILE, settings.prices)
        if undone := ledger.recover():
            log.warning("%d answers were on their way at a crash and are not charged", undone)
        keys = KeyStore(config.home / KEYS_FILE) if with_keys else None
        app = create_app(AsyncSearchFetch(config), ledger, keys, settings)
        shown = sock.getsockname()
        print(f"search-fetch serves on http://{host}:{shown[1]}/", file=sys.stderr, flush=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn handles these while it runs and raises them again when it is done; by default
            # the process would then die of them before it could close its files.
            signal.signal(number, _already_handled)
        sys.setswitchinterval(_SWITCH_SECONDS)
        server = Server(server_config(app, settings))
        server.run(sockets=[sock])
        ledger.close()
        if keys is not None:
            keys.close()


def _already_handled(number: int, frame: FrameType | None) -> None:
    del number, frame
