"""Sockets of strangers: how many there may be, and how long each may take to say what it wants.

Nobody has shown a key yet when a connection is open, so it may cost next to nothing: a place in a
table of bounded size, a few kilobytes of header, and a time that ends. A full table makes room by
closing the connection that has waited longest without a whole request, so half-open ones push each
other out and not those who ask.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deepinfer_engine.server.clock import Clock

log = logging.getLogger(__name__)


class Phase(IntEnum):
    """Where a connection stands; the lowest goes first when places run out."""

    IDLE = 0
    """Nothing of a next request has come."""
    HEAD = 1
    """Some of its header."""
    BODY = 2
    """The whole header, and not the whole body."""
    ANSWER = 3
    """A request that is being answered. Its time is the application's business."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times in seconds. A body gets `body_s` and a second more for each `body_rate` bytes."""

    connections: int = 1024
    idle_s: float = 5.0
    head_s: float = 10.0
    head_bytes: int = 64 * 1024
    body_s: float = 30.0
    body_rate: int = 16 * 1024
    discard_bytes: int = 64 << 20
    """What is read of a body whose answer has gone out already, for clients that send it all before
    they read the refusal."""


class ConnectionTable:
    """All connections of one server. Everything happens on its event loop."""

    def __init__(self, limits: ConnectionLimits, clock: Clock) -> None:
        self.limits = limits
        self.clock = clock
        self.open: set[EdgeProtocol] = set()
        self.closed: Counter[str] = Counter()
        """Connections that this table ended, by reason."""

    def admit(self, new: EdgeProtocol) -> bool:
        """Take a connection in, at the cost of the one that has wasted most; False: no room."""
        if len(self.open) >= self.limits.connections:
            waiting = [c for c in self.open if c.phase < Phase.ANSWER]
            if not waiting:
                self.closed["full"] += 1
                return False
            self.end(min(waiting, key=lambda c: (c.phase, c.since)), "evicted", 503)
        self.open.add(new)
        return True

    def sweep(self) -> None:
        """Close what has been too slow; called about once a second."""
        now = self.clock.monotonic()
        for connection in [c for c in self.open if c.due <= now]:
            reason = connection.phase.name.lower()
            self.end(connection, reason, 0 if connection.phase is Phase.IDLE else 408)

    def end(self, connection: EdgeProtocol, reason: str, status: int) -> None:
        self.closed[reason] += 1
        self.open.discard(connection)
        connection.refuse(status)

    def counts(self) -> dict[str, int]:
        """Open connections by phase."""
        found = Counter(c.phase for c in self.open)
        return {phase.name.lower(): found[phase] for phase in Phase}

    async def sweeping(self) -> None:
        """`sweep` every second until cancelled; one failure is logged and does not end it."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self.sweep()
            except Exception:
                log.exception("connections could not be swept; it is tried again in a second")


_TEXTS = {
    408: ("Request Timeout", "request_timeout", "the request took too long to arrive"),
    431: ("Request Header Fields Too Large", "header_too_large", "the header is too large"),
    503: ("Service Unavailable", "overloaded", "too many connections are open; try again"),
}


class EdgeProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a clock on what a client still owes."""

    def __init__(self, *args: Any, table: ConnectionTable, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self.phase = Phase.IDLE
        self.since = table.clock.monotonic()
        self._answered = 0
        """Responses so far: a new connection may take its time for a first header, an old one has
        its keep-alive time."""
        self._asked = 0
        self._body_bytes = 0
        self._stalled_bytes = 0
        """Received since the parser last completed anything: header lines, mostly."""
        self._advanced = False
        self._refused = False

    @property
    def due(self) -> float:
        """When this connection has been too slow."""
        limits = self._table.limits
        match self.phase:
            case Phase.IDLE:
                return self.since + (limits.idle_s if self._answered else limits.head_s)
            case Phase.HEAD:
                return self.since + limits.head_s
            case Phase.BODY:
                return self.since + limits.body_s + self._body_bytes / limits.body_rate
            case Phase.ANSWER:
                return float("inf")

    def refuse(self, status: int) -> None:
        """Say why, if there is still a response to give it in, and close."""
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison]  # before it is made
            return
        responding = self.cycle is not None and (  # pyright: ignore[reportUnnecessaryComparison]
            self.cycle.response_started and not self.cycle.response_complete
        )
        if status and not responding and not self.transport.is_closing():
            phrase, code, message = _TEXTS[status]
            kind = "server_error" if status >= 500 else "invalid_request_error"
            error = {"message": message, "type": kind, "param": None, "code": code}
            body = json.dumps({"error": error}).encode()
            head = (
                f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._refused = True
        self.transport.close()

    # -- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._table.admit(self):
            self.refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        self._advanced = False
        super().data_received(data)
        self._stalled_bytes = 0 if self._advanced else self._stalled_bytes + len(data)
        if self._stalled_bytes > self._table.limits.head_bytes:
            self._table.end(self, "header", 431)

    # -- the parser -----------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._advanced = True
        self._asked += 1
        self._body_bytes = 0
        self._enter(Phase.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        self._body_bytes += len(body)
        late = self.cycle.response_complete
        if late and self._body_bytes > self._table.limits.discard_bytes:
            self._table.end(self, "discard", 0)
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced = True
        super().on_message_complete()
        self._enter(Phase.ANSWER if self._asked > self._answered else Phase.IDLE)

    def on_response_complete(self) -> None:
        self._answered += 1
        super().on_response_complete()
        if self.phase is Phase.ANSWER and self._answered == self._asked:
            self._enter(Phase.IDLE)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, self._table.clock.monotonic()


def protocol_factory(table: ConnectionTable) -> Callable[..., EdgeProtocol]:
    """What uvicorn makes connections with."""

    def make(*args: Any, **kwargs: Any) -> EdgeProtocol:
        return EdgeProtocol(*args, table=table, **kwargs)

    return make
