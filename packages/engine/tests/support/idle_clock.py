"""Hours that pass at once: the clock jumps to the next timer when nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
import time


class IdleClock:
    """`time.monotonic`, and with it asyncio's timers, for as long as it is patched in.

    While `jumping`, an event loop made by `new_loop` never waits for a timer: what has arrived on
    its sockets is handled first, then the time of the next timer is there. Threads keep real time.
    """

    def __init__(self, monkeypatch) -> None:
        self._real = time.monotonic
        self._ahead = 0.0
        self.jumping = False
        monkeypatch.setattr(time, "monotonic", self)

    def __call__(self) -> float:
        return self._real() + self._ahead

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(_Selector(self))

    def jump(self, seconds: float) -> None:
        self._ahead += seconds

    async def pass_idly(self, seconds: float) -> None:
        """Let so much time pass in which everybody does only what timers tell him to."""
        self.jumping = True
        await asyncio.sleep(seconds)
        self.jumping = False


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: IdleClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None):
        if not self._clock.jumping or timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self._clock.jump(timeout)
        return ready
