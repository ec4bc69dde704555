"""At most so many connections and requests a second for each registrable domain."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from deepinfer_search_fetch.errors import LimitError
from deepinfer_search_fetch.urls import registrable_domain

MAX_DOMAINS = 10_000
PATIENT: ContextVar[bool] = ContextVar("search_fetch_patient", default=False)
"""Whether this request waits for a busy host however many wait before it (a batch, a crawl)."""


@dataclass(slots=True)
class _Domain:
    tokens: float
    updated: float
    connections: asyncio.Semaphore
    not_before: float = 0.0
    waiting: int = 0
    active: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class HostSlots:
    """Token bucket and connection limit per domain; `clock` and `sleep` are arguments for tests."""

    def __init__(
        self,
        requests_per_second: float = 1.0,
        burst: int = 4,
        connections: int = 2,
        queue: int = 16,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate = requests_per_second
        self._burst = burst
        self._connections = connections
        self._queue = queue
        self._clock = clock
        self._sleep = sleep
        self._domains: OrderedDict[str, _Domain] = OrderedDict()

    @asynccontextmanager
    async def slot(self, host: str, *, min_interval: float = 0.0) -> AsyncGenerator[None]:
        """Hold one connection to the host's domain, after waiting for its turn.

        min_interval: seconds between requests a robots.txt asks for (crawl-delay).
        Raises LimitError(host_busy) when the queue is full.
        """
        domain = self._domain(host)
        if domain.waiting >= self._queue and domain.connections.locked() and not PATIENT.get():
            raise LimitError(
                "host_busy",
                f"{domain.waiting} requests wait for this host already (host_queue)",
                details={"limit": "host_queue", "value": self._queue},
            )
        domain.waiting += 1
        try:
            await domain.connections.acquire()
        finally:
            domain.waiting -= 1
        domain.active += 1
        try:
            async with domain.turn:
                await self._take_token(domain, min_interval)
            yield
        finally:
            domain.active -= 1
            domain.connections.release()

    def postpone(self, host: str, seconds: float) -> None:
        """Honour a Retry-After: no request to the host's domain before that."""
        domain = self._domain(host)
        domain.not_before = max(domain.not_before, self._clock() + seconds)

    async def _take_token(self, domain: _Domain, min_interval: float) -> None:
        while True:
            now = self._clock()
            grown = (now - domain.updated) * self._rate
            domain.tokens = min(self._burst, domain.tokens + grown)
            domain.updated = now
            wait = max(domain.not_before - now, (1 - domain.tokens) / self._rate)
            if wait <= 1e-9:
                domain.tokens -= 1
                domain.not_before = max(domain.not_before, now + min_interval)
                return
            await self._sleep(wait)

    def _domain(self, host: str) -> _Domain:
        key = registrable_domain(host)
        known = self._domains.get(key)
        if known is None:
            known = _Domain(self._burst, self._clock(), asyncio.Semaphore(self._connections))
            self._domains[key] = known
            self._forget_idle()
        self._domains.move_to_end(key)
        return known

    def _forget_idle(self) -> None:
        for key in list(self._domains)[: max(0, len(self._domains) - MAX_DOMAINS)]:
            domain = self._domains[key]
            if not domain.active and not domain.waiting:
                del self._domains[key]
