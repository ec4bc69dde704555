"""For tests of the cache and of what is built on it: checkable bytes, a clock, a breaking disk."""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deepinfer_kvtier.faults import Effect, FaultIo

__all__ = ["Effect", "FaultIo", "ManualClock", "payload_of"]


def payload_of(digest: bytes, nbytes: int) -> NDArray[np.uint8]:
    """The bytes a record with this digest should have: checkable without storing them."""
    return np.frombuffer(blake3(digest).digest(length=nbytes), dtype=np.uint8).copy()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 1_800_000_000.0) -> None:
        self._start_s = start_s
        self._passed_s = 0.0

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._passed_s += seconds

    def wall(self) -> float:
        return self._start_s + self._passed_s

    def monotonic(self) -> float:
        return self._passed_s
