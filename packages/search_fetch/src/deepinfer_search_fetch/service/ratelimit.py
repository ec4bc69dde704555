"""Token buckets, one per API key; and who does not stop when refused has to wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deepinfer_search_fetch.errors import LimitError

MAX_KEYS = 100_000
FREE_REFUSALS = 20
REFUSALS_PER_SECOND = 2.0
DELAY_SECONDS = 1.0
DELAYED_PER_CLIENT = 32
DELAYED = 256


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a key stands after asking for a token. retry_after: seconds, 0 when it got one."""

    limit: int
    remaining: int
    reset: int
    retry_after: int

    @property
    def headers(self) -> dict[str, str]:
        """The X-RateLimit-* headers."""
        return {
            "X-RateLimit-Limit": str(self.limit),
            "X-RateLimit-Remaining": str(self.remaining),
            "X-RateLimit-Reset": str(self.reset),
        }

    def check(self) -> None:
        """Raise LimitError(rate_limited) if there was no token."""
        if self.retry_after:
            raise LimitError(
                "rate_limited",
                f"this key's requests come faster than its limit; wait {self.retry_after} s",
                details={"retry_after": self.retry_after},
            )


class RateLimiter:
    """`take` one token per request; the standing says whether there was one."""

    def __init__(
        self,
        per_second: float = 10.0,
        burst: int = 20,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key_id: str) -> Standing:
        """Take a token if there is one."""
        now = self._clock()
        tokens, updated = self._buckets.pop(key_id, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - updated) * self._rate)
        allowed = tokens >= 1.0 - 1e-9
        left = max(0.0, tokens - 1.0) if allowed else tokens
        self._buckets[key_id] = (left, now)
        if len(self._buckets) > MAX_KEYS:
            self._buckets.popitem(last=False)
        return Standing(
            limit=self._burst,
            remaining=int(left),
            reset=math.ceil((self._burst - left) / self._rate),
            retry_after=0 if allowed else max(1, math.ceil((1.0 - tokens) / self._rate)),
        )


class RefusalDelays:
    """A client that was refused FREE_REFUSALS times, and goes on, waits before it is looked at.

    A refusal costs the event loop about as much as an answer, so that a flood of refused requests
    would slow everybody's. Waiting costs nothing, and makes a flood over a few connections a
    trickle. Who waits holds no place; beyond the limits on waiting requests nobody waits.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bucket = RateLimiter(REFUSALS_PER_SECOND, FREE_REFUSALS, clock=clock)
        self._clock = clock
        self._sleep = sleep
        self._until: OrderedDict[str, float] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    def note(self, client: str) -> None:
        """This client was refused."""
        if self._bucket.take(client).retry_after:
            self._until[client] = self._clock() + 2 * DELAY_SECONDS
            self._until.move_to_end(client)
            if len(self._until) > MAX_KEYS:
                self._until.popitem(last=False)

    def delayed(self, client: str) -> bool:
        """Whether this client was refused too often lately."""
        return self._until.get(client, 0.0) > self._clock()

    async def wait(self, client: str) -> None:
        """Return at once, or after DELAY_SECONDS for a client that was refused too often lately."""
        if not self.delayed(client):
            return
        if self._waiting[client] >= DELAYED_PER_CLIENT or self._waiting.total() >= DELAYED:
            return
        self._waiting[client] += 1
        try:
            await self._sleep(DELAY_SECONDS)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]


class ConnectionPace:
    """How long a new connection of an address waits before anything is read from it.

    Each address has `per_second` connections, and twice as many at once. More of them wait for
    their turn, up to MAX_WAIT_SECONDS; what would wait longer is refused.
    """

    MAX_WAIT_SECONDS = 2.0

    def __init__(self, per_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1.0 / per_second
        self._clock = clock
        self._next: OrderedDict[str, float] = OrderedDict()

    def wait(self, address: str) -> float | None:
        """Seconds to wait; None to refuse."""
        now = self._clock()
        turn = max(self._next.pop(address, 0.0), now - 2.0)
        self._next[address] = turn
        if turn - now > self.MAX_WAIT_SECONDS:
            return None
        self._next[address] = turn + self._interval
        if len(self._next) > MAX_KEYS:
            self._next.popitem(last=False)
        return max(0.0, turn - now)
