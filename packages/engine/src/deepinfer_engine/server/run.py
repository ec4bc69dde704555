"""Running the application on a socket: bind first, so that a busy port is told before anything
loads.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import math
import resource
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server.clock import Clock
from deepinfer_engine.server.connections import protocol_factory
from deepinfer_engine.server.services import Services

log = logging.getLogger(__name__)

# Time for an error event to reach a client whose answer had to be cut.
_LAST_WORDS_S = 5.0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; raises ConfigError in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its protocol's number asyncio knows TCP, and sends what is written at once. Without it an
    # answer on a connection in use waits 40 ms between its headers and its body.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use; choose another with --port"
            ) from exc
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    except OverflowError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc}") from exc
    return sock


_FILES_BESIDE_CONNECTIONS = 128
_QUIET_S = 10.0


def room_for_connections(wanted: int) -> int:
    """How many connections the system lets this process hold, of those wanted: its limit of open
    files is raised where it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _FILES_BESIDE_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            room = max(1, soft - _FILES_BESIDE_CONNECTIONS)
            log.warning(
                "this process may open %d files: at most %d connections instead of %d", soft,
                room, wanted,
            )  # fmt: skip
            return room
    return wanted


_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def give_large_blocks_back() -> None:
    """Have the C library return blocks of a MiB and more to the system when they are freed.

    By itself it keeps them once one was freed, and after some bodies of megabytes, with small
    things between them, a process that owns no model holds twice its memory for good. One with a
    model needs such blocks every step: do not call it there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def quiet_accepts(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """Where connections cannot be accepted for want of files or memory, asyncio says so thousands
    of times a second: one line in ten seconds tells how often."""
    before = loop.get_exception_handler()
    told, skipped = -math.inf, 0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told, skipped
        if "socket.accept()" not in str(context.get("message")):
            if before is None:
                loop.default_exception_handler(context)
            else:
                before(loop, context)
            return
        now = clock.monotonic()
        skipped += 1
        if now - told >= _QUIET_S:
            log.error("cannot accept connections (%d times): %s", skipped, context.get("exception"))
            told, skipped = now, 0

    loop.set_exception_handler(handle)


def url_of(sock: socket.socket) -> str:
    """The base URL a client on this machine uses."""
    bound: tuple[str, int] = sock.getsockname()[:2]
    host, port = bound
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # nosec B104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: draining is decided by whoever runs this server."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def listening(
    app: FastAPI, sock: socket.socket, drain_timeout_s: float
) -> AsyncGenerator[None, None]:
    """Serve `app` on `sock` while the body runs; drain afterwards, however the body ends.

    Cancelling during the drain cuts the requests that are still running.
    """
    services: Services = app.state.services
    config = uvicorn.Config(
        app,
        http=protocol_factory(services.connections),  # type: ignore[arg-type]  # a maker of one
        ws="none",
        # The address of a connection is its peer's, whatever a header says.
        proxy_headers=False,
        timeout_keep_alive=math.ceil(services.connections.limits.idle_s),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(_LAST_WORDS_S),
    )
    server = _Server(config)
    quiet_accepts(asyncio.get_running_loop(), services.clock)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    sweeping = asyncio.create_task(services.connections.sweeping())
    try:
        while not server.started and not running.done():
            # uvicorn has no awaitable for this; it takes one or two turns of the loop.
            await asyncio.sleep(0.01)
        yield
        await services.gate.drain(drain_timeout_s)
    except BaseException:
        server.force_exit = True
        raise
    finally:
        services.gate.draining = True
        server.should_exit = True
        try:
            await running
        finally:
            sweeping.cancel()
            services.close()
