"""Time as an argument: production reads the system, tests move it by hand."""

from __future__ import annotations

import time
from typing import Final, Protocol

LATEST_S: Final = (1 << 32) - 1
"""Times on disk are u32 seconds, so time stands still in 2106; nor does it begin before 1970."""


class Clock(Protocol):
    """`wall` in seconds since 1970 for what goes to disk, `monotonic` in seconds for leases."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return _bounded(time.time())

    def monotonic(self) -> float:
        return time.monotonic()


class BoundedClock:
    """A clock whose wall time can be written to disk, wherever the machine believes to be.

    A machine that boots in 1969 or beyond 2106 then stores and finds as any other; what it wrote
    looks old, or young, to the others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic = clock.monotonic

    def wall(self) -> float:
        return _bounded(self._clock.wall())


def _bounded(wall_s: float) -> float:
    return min(max(wall_s, 1.0), float(LATEST_S))
