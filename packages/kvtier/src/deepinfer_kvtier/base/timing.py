"""Time: the clocks as an argument, a circuit breaker, and how long things took."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

LATEST_S: Final = (1 << 32) - 1
"""Times on disk are u32 seconds, so time stands still in 2106; nor does it begin before 1970."""


class Clock(Protocol):
    """`wall` in seconds since 1970 for what goes to disk, `monotonic` in seconds for leases."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks: `wall` and `monotonic`."""

    def wall(self) -> float:
        return _bounded(time.time())

    def monotonic(self) -> float:
        return time.monotonic()


class SteadyClock:
    """Wall time that passes at the pace of the monotonic clock, whatever is done to the machine's.

    Ages decide what is deleted, so a wall clock that is set forward by days must not make records
    old. Where it starts can be corrected: `log.store_files.settle_clock` does, by what a store has
    seen. Its times can be written to disk, wherever the machine believes to be.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic = clock.monotonic
        self.rebase(clock.wall())

    def wall(self) -> float:
        return _bounded(self._base_s + self.monotonic() - self._since_s)

    def rebase(self, wall_s: float) -> None:
        """It is now this time."""
        self._base_s, self._since_s = _bounded(wall_s), self.monotonic()

    def off_s(self) -> float:
        """Seconds by which the machine's clock is ahead of this one; negative = behind."""
        return _bounded(self._clock.wall()) - self.wall()


def _bounded(wall_s: float) -> float:
    return min(max(wall_s, 1.0), float(LATEST_S))


WINDOW_S = 10.0
ERRORS_TO_OPEN = 5
OPEN_S = 10.0


class Breaker:
    """Opens after 5 errors in 10 s; after 10 s lets calls through again until the next error."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._errors: deque[float] = deque(maxlen=ERRORS_TO_OPEN)
        self._open_until = float("-inf")
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls should be skipped now."""
        return self._clock.monotonic() < self._open_until

    def error(self) -> None:
        """Report a failed call."""
        now = self._clock.monotonic()
        with self._lock:
            self._errors.append(now)
            burst = len(self._errors) == ERRORS_TO_OPEN and now - self._errors[0] <= WINDOW_S
            if burst or self._probing:
                self._open_until = now + OPEN_S
                self._probing = True
                self._errors.clear()

    def success(self) -> None:
        """Report a call that worked; ends the half-open state."""
        if self._probing and not self.is_open:
            with self._lock:
                self._probing = False
                self._errors.clear()


What = Literal["load", "put", "write"]
MIXED = "mixed"
"""The tier of a load whose blocks came from several."""


LOAD_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of observations by upper bound; not thread-safe, the owner holds a lock."""

    def __init__(self, bounds: tuple[float, ...] = LOAD_BUCKETS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """Cumulative counts by bound, the last one without limit, and the sum."""
        cumulative: list[tuple[str, int]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            cumulative.append((bound, total))
        return {"buckets": cumulative, "sum": self._sum, "count": total}


class Timings:
    """Histograms of seconds and sums of bytes. Thread-safe.

    "load": whole loads, by the tier that had the blocks; "put": calls of producers, which end in
    host memory; "write": what the thread of a tier's queue wrote in one call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[What, str], Histogram] = {}
        self._bytes: dict[tuple[What, str], int] = {}

    def observe(self, what: What, tier: str, nbytes: int, seconds: float) -> None:
        """One more of these."""
        key = what, tier
        with self._lock:
            histogram = self._seconds.get(key)
            if histogram is None:
                histogram = self._seconds[key] = Histogram()
            histogram.observe(seconds)
            self._bytes[key] = self._bytes.get(key, 0) + nbytes

    def of(self, what: What, tier: str) -> Callable[[int, float], None]:
        """`observe` for one kind of thing: takes bytes and seconds."""
        return lambda nbytes, seconds: self.observe(what, tier, nbytes, seconds)

    def snapshot(self) -> Mapping[What, Mapping[str, Mapping[str, Any]]]:
        """what -> tier -> "bytes", "count", "sum" (seconds) and "buckets"."""
        found: dict[What, dict[str, Mapping[str, Any]]] = {"load": {}, "put": {}, "write": {}}
        with self._lock:
            for (what, tier), histogram in sorted(self._seconds.items()):
                found[what][tier] = {
                    "bytes": self._bytes[what, tier],
                    **histogram.snapshot(),
                }
        return found
