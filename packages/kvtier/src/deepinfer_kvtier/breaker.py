"""Circuit breaker: a tier that keeps failing is left alone for a while."""

from __future__ import annotations

import threading
from collections import deque

from deepinfer_kvtier.clock import Clock

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
