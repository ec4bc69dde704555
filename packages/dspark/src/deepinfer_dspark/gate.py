"""Whether drafting pays at all, from what rounds with and without drafts really took.

A budget decides how many drafts to verify once they are made. It cannot know what making them, the
wider batch and the bookkeeping cost together, and a drafter that is never right costs its time
whatever the budget says. `SpeculationGate` compares tokens a millisecond of both kinds of rounds,
as measured, and shuts the slower one out, looking again from time to time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from deepinfer_dspark.errors import ShapeError

KEPT: Final = 24
"""Rounds of each kind that are remembered, by size class of the batch."""
ENOUGH: Final = 4
"""Rounds of a kind before its speed is believed."""


def _rounds() -> deque[tuple[int, float]]:
    return deque(maxlen=KEPT)


@dataclass(slots=True)
class _Class:
    """Batches of about one size: (tokens gained, ms) of recent rounds with and without drafts."""

    drafted: deque[tuple[int, float]] = field(default_factory=_rounds)
    plain: deque[tuple[int, float]] = field(default_factory=_rounds)
    wait: int = 0  # rounds until drafting is tried again
    pause: int = 0  # how long the last wait was
    probes: int = 0  # rounds left of a trial


class SpeculationGate:
    """Open while rounds with drafts gain tokens faster than rounds without.

    margin:     relative advantage that drafting must show.
    first, last: rounds to wait before drafting is tried again, doubled from first to last while it
                keeps losing. A trial is two rounds, so the worst share of them is 2 / last.
    plain_every: while open, one round in so many runs without drafts, to know what that costs;
                rounds in which nothing was drafted anyway count as such.

    What it decides depends on earlier rounds only, so it never changes the distribution.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(
        self, *, margin: float = 0.0, first: int = 8, last: int = 256, plain_every: int = 64
    ) -> None:
        if not margin >= 0 or not 1 <= first <= last or plain_every < 2:
            raise ShapeError(
                "SpeculationGate wants margin >= 0, 1 <= first <= last and plain_every >= 2, got "
                f"{margin}, {first}, {last} and {plain_every}"
            )
        self._margin, self._first, self._last = margin, first, last
        self._plain_every = plain_every
        self._classes: dict[int, _Class] = {}
        self._since_plain: dict[int, int] = {}

    def open(self, requests: int) -> bool:
        """Whether the next round of so many requests should draft. Ask once a round."""
        size = requests.bit_length()
        seen = self._classes.setdefault(size, _Class())
        if seen.wait > 0:
            seen.wait -= 1
            if seen.wait == 0:
                seen.probes = 2
            return False
        if seen.probes > 0:
            seen.probes -= 1
            return True
        if len(seen.drafted) < ENOUGH:
            return True
        due = self._plain_every if len(seen.plain) >= ENOUGH else ENOUGH
        if self._since_plain.get(size, 0) >= due:
            return False
        if len(seen.plain) >= ENOUGH and not self._pays(seen):
            seen.pause = min(max(2 * seen.pause, self._first), self._last)
            seen.wait = seen.pause
            return False
        seen.pause = 0
        return True

    def record(self, requests: int, *, drafts: int, tokens: int, ms: float) -> None:
        """How a round went: drafts verified in it (0 = none made or used), tokens gained by all
        requests, and its milliseconds with drafting and verification."""
        size = requests.bit_length()
        seen = self._classes.setdefault(size, _Class())
        if not ms > 0:
            return
        (seen.drafted if drafts else seen.plain).append((tokens, ms))
        self._since_plain[size] = self._since_plain.get(size, 0) + 1 if drafts else 0

    def _pays(self, seen: _Class) -> bool:
        return _rate(seen.drafted) > _rate(seen.plain) * (1.0 + self._margin)


def _rate(rounds: deque[tuple[int, float]]) -> float:
    """Tokens a millisecond; a round that took far longer than most (another process, a cache
    growing) counts as twice the median."""
    middle = sorted(ms for _, ms in rounds)[len(rounds) // 2]
    return sum(t for t, _ in rounds) / sum(min(ms, 2.0 * middle) for _, ms in rounds)
