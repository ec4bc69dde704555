"""What clients' pages cost lately, and whose therefore come after those of the others.

Who pays little is never behind somebody who pays much: that is what keeps one client's answers
prompt beside any number of greedy ones. It is relative, since on a slow machine every page costs
more: a client is behind when it uses more than a little, and at least half of what those who use
more than a little do on average. With nobody else there it is never behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HALF_LIFE_SECONDS = 60.0
# Of CPU time, decayed: a thirtieth of a core all the time.
LITTLE_SECONDS = 3.0
# One page that took this long has its client stand behind for two half-lives.
LONG_SECONDS = 0.4
_LONG_COUNTS_SECONDS = 4 * LITTLE_SECONDS
_MUCH_LESS = 0.5
# Whose pages take less than this is known to need a place for a moment only.
_SHORT_SECONDS = 0.05
_KNOWN_PAGES = 3.0
_THERE_SECONDS = 60.0
_MAX_REMEMBERED = 10_000


class Accounts:
    """CPU seconds by client, halved every HALF_LIFE_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}
        self._pages: dict[str, tuple[float, float]] = {}

    def ended(self, client: str) -> None:
        """One more page of this client is done."""
        now = self._clock()
        self._pages[client] = (self._now(client, now, self._pages) + 1, now)

    def add(self, client: str, seconds: float, *, long: bool = False) -> None:
        """This client's work took so long. long: it belongs to a page that takes LONG_SECONDS."""
        now = self._clock()
        spent = self._now(client, now) + seconds
        self._spent[client] = (max(spent, _LONG_COUNTS_SECONDS) if long else spent, now)
        if len(self._spent) > _MAX_REMEMBERED:
            for other in [c for c in self._spent if self._now(c, now) < 0.01]:
                del self._spent[other]
                self._pages.pop(other, None)

    def spends_much(self, client: str) -> bool:
        """Whether its work comes after that of the others."""
        now = self._clock()
        own = self._now(client, now)
        if own <= LITTLE_SECONDS:
            return False
        others = self._others(client, now)
        much = [seconds for seconds in others if seconds > LITTLE_SECONDS]
        return bool(others) and own > _MUCH_LESS * sum(much) / max(len(much), 1)

    def spends_less(self, client: str) -> bool:
        """Whether it is known by some pages, and used less than half of what the others did on
        average, where that is more than a little: its pages need not give way to theirs. Who is new
        has no such claim: an attack begins with many who are."""
        now = self._clock()
        others = self._others(client, now)
        average = sum(others) / len(others) if others else 0.0
        if average <= LITTLE_SECONDS or self._now(client, now, self._pages) < _KNOWN_PAGES:
            return False
        return self._now(client, now) < _MUCH_LESS * average

    def modest(self, client: str) -> bool:
        """Whether it used much less than the others, or its pages are known to be short: while an
        attack begins nobody has used much yet."""
        if self.spends_less(client):
            return True
        now = self._clock()
        pages = self._now(client, now, self._pages)
        return pages >= _KNOWN_PAGES and self._now(client, now) < pages * _SHORT_SECONDS

    def spent(self, client: str) -> float:
        """What it used lately."""
        return self._now(client, self._clock())

    def _others(self, client: str, now: float) -> list[float]:
        """What those used who were there lately."""
        return [
            self._now(other, now)
            for other, (_, at) in self._spent.items()
            if other != client and now - at < _THERE_SECONDS
        ]

    def _now(
        self, client: str, now: float, sums: dict[str, tuple[float, float]] | None = None
    ) -> float:
        """What is left of a sum by now, of the seconds spent if none is named."""
        value, at = (self._spent if sums is None else sums).get(client, (0.0, now))
        return value * 0.5 ** ((now - at) / HALF_LIFE_SECONDS)
