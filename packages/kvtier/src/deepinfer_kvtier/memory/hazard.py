"""How likely a conversation is to come back, learned while serving.

Each turn of a conversation belongs to a kind (how many turns came before, how much it added). For
every kind this counts, by the time since the turn, how often the next turn followed and how long
turns waited without one. From these rates follows a price for keeping the turn's blocks: the best
ratio of expected hits to expected time of occupation over all times at which one could still
stop waiting. Pricing by this ratio is Gittins' index policy for one store of limited size.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
from numpy.typing import NDArray

EDGES_S: Final = (
    *(0, 4, 8, 15, 25, 40, 60, 80, 100, 125, 150, 180, 220, 270, 330, 400, 500, 650, 850),
    *(1100, 1500, 2200, 3600, 7200, 14_400, 28_800, 57_600, 115_200, 230_400, 460_800),
)
"""Bounds of the age classes, seconds; the last one is open."""

_LAST_BIN_S = 460_800.0
_BINS = len(EDGES_S)
_WIDTHS = np.append(np.diff(EDGES_S).astype(np.float64), _LAST_BIN_S)


_PRIOR_RETURNS = 20.0
_MIDDLES = np.asarray(EDGES_S) + _WIDTHS / 2
_PRIOR_WAITED_S = _PRIOR_RETURNS * (_MIDDLES + 60.0) / 0.5
"""What is believed of all kinds before anything was seen, in each age class: the longer a turn
waits, the less likely it is continued (0.5 / (age + 60 s)), so that prices start out as those of
LRU."""


class ReturnRates:
    """Counts of returns and of waiting time, by kind of turn and age.

    kinds:  how many kinds there are.
    doubt:  returns' worth of belief in the average of all kinds before a kind's own counts matter.
    """

    def __init__(self, kinds: int, *, doubt: float = 10.0) -> None:
        self._returns: NDArray[np.float64] = np.zeros((kinds, _BINS))
        self._waited_s: NDArray[np.float64] = np.zeros((kinds, _BINS))
        self._doubt = doubt

    def observe(self, kind: int, age_s: float, *, returned: bool, counted: int = 0) -> None:
        """A turn of this kind waited `age_s` seconds, and then its next turn came or did not.

        counted: age classes whose time was counted before, by `passed`.
        """
        at = age_bin(age_s)
        self.passed(kind, counted, at)
        self._waited_s[kind, at] += age_s - EDGES_S[at]
        if returned:
            self._returns[kind, at] += 1

    def passed(self, kind: int, first: int, end: int) -> None:
        """A turn of this kind waited through these age classes, `end` not included."""
        self._waited_s[kind, first:end] += _WIDTHS[first:end]

    def waited(self, kind: int, at: int, seconds: float) -> None:
        """Turns of this kind and age class have waited so long in it and still do."""
        self._waited_s[kind, at] += seconds

    def fade(self, share: float) -> None:
        """Let everything counted so far weigh less, so that traffic may change its ways."""
        self._returns *= share
        self._waited_s *= share

    def waited_s(self) -> float:
        """All the waiting time that was observed, seconds."""
        return float(self._waited_s.sum())

    def copy(self) -> ReturnRates:
        """An independent copy, for counts that are not final."""
        other = ReturnRates(len(self._returns), doubt=self._doubt)
        other._returns[:] = self._returns
        other._waited_s[:] = self._waited_s
        return other

    def rates(self) -> NDArray[np.float64]:
        """Returns a second, (kinds, ages): own counts drawn towards kind average and shape of all.

        A kind's expected rate is the rate of all kinds at that age, times one factor for the kind.
        """
        common = (self._returns.sum(0) + _PRIOR_RETURNS) / (self._waited_s.sum(0) + _PRIOR_WAITED_S)
        expected = (self._waited_s * common).sum(1)
        factor = (self._returns.sum(1) + self._doubt) / (expected + self._doubt)
        believed = np.maximum(common[None, :] * factor[:, None], 1e-9)
        return (self._returns + self._doubt) / (self._waited_s + self._doubt / believed)

    def prices(self) -> NDArray[np.float64]:
        """Hits a second of occupation that a turn is still worth, (kinds, ages)."""
        rates = self.rates()
        chance = 1 - np.exp(-rates * _WIDTHS)
        best = np.zeros_like(rates)
        for start in range(_BINS):
            alive = np.cumprod(1 - chance[:, start:], axis=1)
            reached = np.concatenate((np.ones((len(rates), 1)), alive[:, :-1]), axis=1)
            hits = np.cumsum(reached * chance[:, start:], axis=1)
            # Expected time in a class whose rate is constant: chance of leaving it over the rate.
            seconds = np.cumsum(reached * chance[:, start:] / rates[:, start:], axis=1)
            best[:, start] = (hits / seconds).max(axis=1)
        return best


def age_bin(age_s: float) -> int:
    """Index of the age class; negative ages count as 0."""
    return max(0, bisect_right(EDGES_S, age_s) - 1)
