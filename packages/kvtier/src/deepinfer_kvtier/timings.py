"""How long things took and how much they moved, by what was done and in which tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from deepinfer_kvtier.metrics import Histogram

What = Literal["load", "put", "write"]
MIXED = "mixed"
"""The tier of a load whose blocks came from several."""


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
