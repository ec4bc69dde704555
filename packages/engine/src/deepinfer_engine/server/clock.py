"""Time as a value that is passed in: the real one here, a hand-driven one in tests."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since an arbitrary start; only differences mean anything."""
        ...

    async def wait(
        self, tasks: set[asyncio.Future[Any]], timeout_s: float
    ) -> set[asyncio.Future[Any]]:
        """The tasks that are done: returns when one is, or empty when `timeout_s` passed first."""
        ...


class SystemClock:
    """The machine's monotonic clock and asyncio's timers."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def wait(
        self, tasks: set[asyncio.Future[Any]], timeout_s: float
    ) -> set[asyncio.Future[Any]]:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return done
