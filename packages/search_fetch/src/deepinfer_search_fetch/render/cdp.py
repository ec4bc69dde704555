"""The DevTools protocol over two pipes: NUL-terminated JSON, and no port to connect to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from deepinfer_search_fetch.errors import UpstreamError

MAX_MESSAGE_BYTES = 128 * 1024 * 1024
Event = Callable[[str, dict[str, Any]], None]


class BrowserLostError(Exception):
    """The browser died or was killed while it was needed."""


class Connection:
    """Calls with answers, and events for the session that asked for them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._handlers: dict[str, Event] = {}
        self._pump = asyncio.create_task(self._read())

    def on_events(self, session: str, handler: Event | None) -> None:
        """`handler(method, params)` runs for each event of `session`; None takes it off."""
        if handler is None:
            self._handlers.pop(session, None)
        else:
            self._handlers[session] = handler

    async def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """The result of one command. Raises UpstreamError if the browser refuses it,
        BrowserLostError if it is gone."""
        if self._pump.done():
            raise BrowserLostError
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._next_id] = answer
        try:
            self._writer.write(json.dumps(message).encode() + b"\0")
            await self._writer.drain()
            reply = await answer
        except OSError:
            raise BrowserLostError from None
        finally:
            self._waiting.pop(message["id"], None)
        if "error" in reply:
            raise UpstreamError("internal", f"{method}: {reply['error'].get('message')}")
        return reply.get("result", {})

    async def close(self) -> None:
        """Stop reading; calls that still wait get BrowserLostError."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._writer.close()

    async def _read(self) -> None:
        try:
            while True:
                raw = await self._reader.readuntil(b"\0")
                self._dispatch(json.loads(raw[:-1]))
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError):
            pass
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(BrowserLostError())

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "id" in message:
            answer = self._waiting.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)
            return
        handler = self._handlers.get(message.get("sessionId", ""))
        if handler is not None:
            handler(message["method"], message.get("params", {}))
