"""Calls for an event loop from other threads: those that come together wake it once."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Of one event loop. A step's output for hundreds of streams costs one wake-up, not hundreds,
    each of which writes to a socket to end a `select`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._awake = False
        self._lock = threading.Lock()

    def post(self, call: Callable[..., None], *args: object) -> None:
        """Run `call(*args)` on the loop, in the order of posting. Nothing happens once the loop is
        closed."""
        with self._lock:
            self._calls.append((call, args))
            if self._awake:
                return
            self._awake = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # nobody listens any more
            with self._lock:
                self._calls.clear()
                self._awake = False

    def _deliver(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, deque()
            self._awake = False
        for call, args in calls:
            try:
                call(*args)
            except Exception as error:
                # As for a callback of its own: told, and no other call is lost.
                self._loop.call_exception_handler(
                    {"message": f"{call!r} failed", "exception": error}
                )
