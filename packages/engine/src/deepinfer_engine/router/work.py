"""What a prefill worker has to do, in milliseconds, and how fast it turned out to be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PREFILL_RATE = 2000.0
"""Tokens a second, until a worker has shown its own rate."""
READ_RATE = {"memory": 20e6, "below": 2e6}
"""Tokens a second that are loaded instead of computed, by where they lie: 890 bytes each."""
FIXED_MS = 4.0
RECENT_S = 60.0
"""Work that is over counts towards a worker's share for about so long."""
_WEIGHT = 0.2
_ENOUGH_TOKENS = 64


class Work:
    """Predicted work of one worker: what it has now, and lately had.

    Its rate is learned from first tokens: a prompt that came behind others was begun when the one
    before it was ready.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now_ms = 0.0
        self._recent_ms = 0.0
        self._at = clock()
        self._ready_at = float("-inf")
        self._held = 0
        self.rate: float | None = None
        """Prompt tokens computed a second; None until it has shown it."""

    @property
    def queue_ms(self) -> float:
        """What a request that comes now waits for."""
        return self._now_ms

    @property
    def load(self) -> float:
        """Milliseconds of work that it has or lately had: its share of the fleet's."""
        return self._now_ms + self._decayed()

    def cost_ms(self, miss: int, memory: int, below: int, rate: float | None = None) -> float:
        """A prompt of which so many tokens are computed, at `rate` a second, and read from memory
        or from below."""
        speed = rate or PREFILL_RATE
        read = memory / READ_RATE["memory"] + below / READ_RATE["below"]
        return FIXED_MS + 1000 * (miss / speed + read)

    def begin(self, ms: float) -> Task:
        """A prompt is given to the worker."""
        self._now_ms += ms
        self._held += 1
        return Task(self, ms, self._clock())

    def end(self, task: Task, computed: int | None) -> None:
        """A prompt is over; `computed`: how many of its tokens were, when it came to its end."""
        now = self._clock()
        self._held -= 1
        # Exactly nothing when nothing is held: sums of floats would drift over a million prompts.
        self._now_ms = max(0.0, self._now_ms - task.ms) if self._held else 0.0
        self._recent_ms = self._decayed() + task.ms
        self._at = now
        if computed is None:
            return
        took = now - max(task.since, self._ready_at)
        self._ready_at = now
        if computed >= _ENOUGH_TOKENS and took > 0:
            seen = computed / took
            self.rate = seen if self.rate is None else (1 - _WEIGHT) * self.rate + _WEIGHT * seen

    def _decayed(self) -> float:
        return self._recent_ms * math.exp((self._at - self._clock()) / RECENT_S)


class Task:
    """One prompt at one worker, until its first token or its end; ended once."""

    __slots__ = ("_over", "_work", "ms", "since")

    def __init__(self, work: Work, ms: float, since: float) -> None:
        self._work = work
        self.ms = ms
        self.since = since
        self._over = False

    def end(self, computed: int | None = None) -> None:
        """See `Work.end`."""
        if not self._over:
            self._over = True
            self._work.end(self, computed)
