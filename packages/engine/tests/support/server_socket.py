"""The application on a real loopback socket, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from deepinfer_engine.server.run import bind, listening, url_of


class SocketServer:
    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, app: FastAPI) -> None:
        self.url = url
        self.app = app
        self._loop = loop

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)


@contextmanager
def serving(build: Callable[[], FastAPI], drain_timeout_s: float = 5.0):
    """Serve what `build` makes (called on the server's loop) until the block ends."""
    sock = bind("127.0.0.1", 0)
    up = threading.Event()
    state: dict[str, Any] = {}

    async def main() -> None:
        state["loop"], state["stop"] = asyncio.get_running_loop(), asyncio.Event()
        state["app"] = build()
        async with listening(state["app"], sock, drain_timeout_s):
            up.set()
            await state["stop"].wait()

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            up.set()

    thread = threading.Thread(target=run)
    thread.start()
    up.wait(20)
    try:
        yield SocketServer(url_of(sock), state["loop"], state["app"])
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join(20)
        assert not thread.is_alive()
