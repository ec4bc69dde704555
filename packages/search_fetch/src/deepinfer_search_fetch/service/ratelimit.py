"""Token buckets, one per API key."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from deepinfer_search_fetch.errors import LimitError

MAX_KEYS = 100_000


class RateLimiter:
    """`take` one token per request; headers tell the caller where it stands."""

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

    def take(self, key_id: str) -> dict[str, str]:
        """The X-RateLimit-* headers. Raises LimitError(rate_limited) with `retry_after` seconds."""
        now = self._clock()
        tokens, updated = self._buckets.pop(key_id, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - updated) * self._rate)
        allowed = tokens >= 1.0 - 1e-9
        self._buckets[key_id] = (tokens - 1.0 if allowed else tokens, now)
        if len(self._buckets) > MAX_KEYS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = math.ceil((1.0 - tokens) / self._rate)
            raise LimitError(
                "rate_limited",
                f"more than {self._rate:g} requests per second",
                details={"retry_after": wait},
            )
        return {
            "X-RateLimit-Limit": str(self._burst),
            "X-RateLimit-Remaining": str(int(tokens - 1.0)),
            "X-RateLimit-Reset": str(math.ceil((self._burst - tokens + 1.0) / self._rate)),
        }
