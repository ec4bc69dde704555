"""When to stop asking a worker that fails, and how much may be tried again at all."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

CONSECUTIVE = 5
WINDOW = 20
FIRST_OPEN_S = 5.0
MOST_OPEN_S = 60.0
BUDGET_SHARE = 0.1
BUDGET_BURST = 256
"""As many streams may lose one worker at the same moment."""


class Breaker:
    """Opens after 5 failures in a row, or more than half of the last 20; for 5 s, then twice as
    long each time, up to a minute. Then one request tries whether the worker is well."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outcomes: deque[bool] = deque(maxlen=WINDOW)
        self._in_a_row = 0
        self._open_s = FIRST_OPEN_S
        self._open_until: float | None = None
        self._trying = False

    @property
    def state(self) -> str:
        if self._open_until is None:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    def allows(self) -> bool:
        return self._open_until is None or (self._clock() >= self._open_until and not self._trying)

    def begin(self) -> None:
        """A request goes to the worker."""
        if self._open_until is not None:
            self._trying = True

    def succeeded(self) -> None:
        if self._open_until is not None:
            self._outcomes.clear()
            self._open_until, self._open_s = None, FIRST_OPEN_S
        self._trying = False
        self._in_a_row = 0
        self._outcomes.append(True)

    def gave_nothing_away(self) -> None:
        """The request ended and says nothing about the worker."""
        self._trying = False

    def failed(self) -> None:
        self._in_a_row += 1
        self._outcomes.append(False)
        lost = self._outcomes.count(False)
        if self._trying:
            self._open_s = min(2 * self._open_s, MOST_OPEN_S)
            self._open()
        elif self._open_until is None and (
            self._in_a_row >= CONSECUTIVE or (len(self._outcomes) == WINDOW and 2 * lost > WINDOW)
        ):
            self._open()

    def reset(self) -> None:
        """The worker was replaced: what the old one did counts no more."""
        self.__init__(self._clock)

    def _open(self) -> None:
        self._trying = False
        self._open_until = self._clock() + self._open_s


class RetryBudget:
    """A tenth of the requests may be tried again: more would only press a sick fleet further."""

    def __init__(self) -> None:
        self._left = float(BUDGET_BURST)

    def earn(self) -> None:
        """A new request came."""
        self._left = min(self._left + BUDGET_SHARE, float(BUDGET_BURST))

    def spend(self) -> bool:
        """Whether one more try is within the budget."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
