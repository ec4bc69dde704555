"""Time as an argument: production reads the system, tests move it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """`wall` in seconds since 1970 for what goes to disk, `monotonic` in seconds for leases."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
