"""Writing an answer to the socket: server-sent events, keep-alives, deadlines, and clients that
leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Send

from deepinfer_engine.codec.errors import Draining, Protocol, WireError
from deepinfer_engine.codec.protocol import WireEvent
from deepinfer_engine.errors import EngineError
from deepinfer_engine.server.clock import Clock

T = TypeVar("T")

# Messages has an event for it; in Chat a comment line is what every SSE parser skips.
_KEEPALIVE = {
    "chat": b": keep-alive\n\n",
    "completions": b": keep-alive\n\n",
    "responses": b": keep-alive\n\n",
    "messages": b'event: ping\ndata: {"type": "ping"}\n\n',
}
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(EngineError):  # noqa: N818 - reads as the condition it reports
    """Nobody reads the answer any more; `cause` is `disconnect` or `slow_reader`."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the client is gone ({cause})")
        self.cause = cause


class Deadline(EngineError, TimeoutError):  # noqa: N818
    """The answer took longer than it may."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of one answer, in seconds; see `Settings` for their meaning."""

    silence_first: float
    silence: float
    first_token: float
    between_tokens: float
    slow_reader: float
    total: float | None = None


async def watch(
    events: AsyncGenerator[list[WireEvent], None],
    gone: asyncio.Future[None],
    ending: asyncio.Future[None],
    clock: Clock,
    timing: Timing,
) -> AsyncGenerator[list[WireEvent] | None, None]:
    """The batches of `events`; None whenever it is time for a keep-alive.

    Raises ClientGone when `gone` is done, Draining when `ending` is (the server's time to finish is
    over), Deadline when a limit passed. However it ends, `events` is closed, which aborts a
    generation that is not over. A keep-alive is not progress.
    """
    spoke = progress = clock.monotonic()
    end = progress + timing.total if timing.total is not None else None
    silence, stall = timing.silence_first, timing.first_token
    pending: asyncio.Task[list[WireEvent]] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(events))
            due = min(spoke + silence, progress + stall, *([] if end is None else [end]))
            if (wait := due - clock.monotonic()) > 0:
                await clock.wait({pending, gone, ending}, wait)
            if gone.done():
                raise ClientGone("disconnect")
            if ending.done():
                raise Draining("the server is shutting down and could not finish this answer")
            if pending.done():
                finished, pending = pending, None
                try:
                    batch = finished.result()
                except _Exhausted:
                    return
                yield batch
                spoke = progress = clock.monotonic()
                silence, stall = timing.silence, timing.between_tokens
                continue
            now = clock.monotonic()
            if end is not None and now >= end:
                raise Deadline(f"the request's own limit of {timing.total:g} s passed")
            if now >= progress + stall:
                raise Deadline(f"no token for {stall:g} s")
            if now >= spoke + silence:
                yield None
                spoke, silence = now, timing.silence
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
        await events.aclose()


class _Exhausted(Exception):  # noqa: N818
    """StopAsyncIteration cannot leave a task."""


async def _next(events: AsyncGenerator[list[WireEvent], None]) -> list[WireEvent]:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise _Exhausted from None


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Coroutine[Any, Any, T], gone: asyncio.Future[None]) -> T:
    """The result of `work`; it is cancelled, and ClientGone raised, when the client leaves."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("disconnect")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


@dataclass(slots=True)
class AnswerWriter:
    """The HTTP response of one generation. The status line waits for the first thing to say, so
    that an error before it is a plain HTTP error and one after it is an event of the protocol."""

    send: Send
    protocol: Protocol
    stream: bool
    slow_reader_s: float
    headers: dict[str, str] = field(default_factory=dict[str, str])
    started: bool = False

    async def events(self, batch: list[WireEvent]) -> None:
        """Write one step's events; a non-streaming answer is written by `whole` instead."""
        if self.stream and batch:
            await self._write("".join(map(_sse, batch)).encode())

    async def keepalive(self) -> None:
        """Something that keeps proxies from closing a silent connection and that parsers skip."""
        await self._write(_KEEPALIVE[self.protocol] if self.stream else b"\n")

    async def whole(self, body: str) -> None:
        """The complete JSON answer; blank lines may already stand before it."""
        data = body.encode()
        if not self.started:
            await self._start(200, _json_headers(data))
        await self._body(data)

    async def error(self, error: WireError) -> None:
        """The error as a response of its own, or in the stream that already began."""
        data = error.json.encode()
        if not self.started:
            await self._start(error.status, {**_json_headers(data), **error.headers})
        elif self.stream:
            data = _sse(WireEvent(*error.event(self.protocol))).encode()
        await self._body(data)

    async def end(self) -> None:
        """The last byte went out before this; now the client knows."""
        await self._body(b"", more=False)

    async def _write(self, data: bytes) -> None:
        if not self.started:
            plain = {"content-type": "application/json"}
            await self._start(200, _SSE_HEADERS if self.stream else plain)
        await self._body(data)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        raw = [(k.lower().encode(), v.encode()) for k, v in {**headers, **self.headers}.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self.slow_reader_s):
                await self.send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone("slow_reader") from None
        except OSError:
            raise ClientGone("disconnect") from None


def _json_headers(data: bytes) -> dict[str, str]:
    return {"content-type": "application/json", "content-length": str(len(data))}


def _sse(event: WireEvent) -> str:
    head = f"event: {event.name}\n" if event.name else ""
    return f"{head}data: {event.data}\n\n"
