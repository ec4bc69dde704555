"""Running the application on a socket: bind first, so that a busy port is told before anything
loads.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server.services import Services

# Time for an error event to reach a client whose answer had to be cut.
_LAST_WORDS_S = 5.0


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; raises ConfigError in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
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


def url_of(sock: socket.socket) -> str:
    """The base URL a client on this machine uses."""
    bound: tuple[str, int] = sock.getsockname()[:2]
    host, port = bound
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
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
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(_LAST_WORDS_S),
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[sock]))
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
        await running
