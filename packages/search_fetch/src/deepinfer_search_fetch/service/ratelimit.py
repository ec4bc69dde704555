"""Token buckets, one per API key."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_search_fetch.errors import LimitError

MAX_KEYS = 100_000


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
