"""How long something takes, as counters that only grow: what a worker reports of a histogram."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Upper ends of the buckets, in seconds."""
MARK = "|"
"""Between a histogram's name and the end of a bucket, or `sum`, in the name of a counter."""


class Durations:
    """Not thread-safe: whoever observes also reads, or holds a lock for both."""

    def __init__(self, name: str) -> None:
        """`name` is that of the metric without its unit, such as `queue`."""
        self._name = f"{name}_seconds"
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def counters(self) -> dict[str, float]:
        """`queue_seconds|0.5`: observations up to there; `|inf`: all; `|sum`: seconds."""
        ends = [*(f"{bound:g}" for bound in BOUNDS), "inf"]
        found = {
            f"{self._name}{MARK}{end}": float(n)
            for end, n in zip(ends, accumulate(self._counts), strict=True)
        }
        return {**found, f"{self._name}{MARK}sum": self._sum}
