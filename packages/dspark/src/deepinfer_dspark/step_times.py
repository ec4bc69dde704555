"""Step time by batch size, learned from the steps that run anyway.

`StepTable.measure` wants idle time at the start; this wants none. Sizes that were not seen yet are
read off a line through those that were, at first an optimistic one, so that they get tried.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

from deepinfer_dspark.errors import ShapeError, TableError
from deepinfer_dspark.step_table import StepTable


class StepTimes:
    """Median of the last `window` steps of every size.

    slope: assumed growth a token, relative to the smallest size seen, where nothing was measured.
    top:   largest size the table holds.
    """

    def __init__(self, top: int, *, slope: float = 0.02, window: int = 9) -> None:
        if top < 1 or not slope >= 0 or window < 1:
            raise ShapeError(
                f"StepTimes wants top >= 1, slope >= 0, window >= 1, got {top}, {slope}, {window}"
            )
        self._top, self._slope, self._window = top, slope, window
        self._recent: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}
        self._table: StepTable | None = None

    def record(self, tokens: int, ms: float) -> None:
        """One step of `tokens` tokens took `ms`; beyond `top`, or no time at all, it is dropped."""
        if not (1 <= tokens <= self._top and 0 < ms < float("inf")):
            return
        recent = self._recent.setdefault(tokens, deque(maxlen=self._window))
        recent.append(ms)
        self._median[tokens] = statistics.median(recent)
        self._table = None

    @property
    def known(self) -> bool:
        """Whether any step was recorded."""
        return bool(self._median)

    def table(self) -> StepTable:
        """Times of sizes 1..top, not falling. Raises TableError before the first record."""
        if self._table is None:
            if not self._median:
                raise TableError("StepTimes has recorded no step yet")
            sizes = sorted(self._median)
            ms = _rising([self._median[s] for s in sizes], [len(self._recent[s]) for s in sizes])
            grid = np.arange(1, self._top + 1)
            line = np.interp(grid, sizes, ms)
            rise = self._slope * float(ms[0])
            if len(sizes) > 1:  # beyond what was seen, as steep as what was seen on average
                rise = max(rise / 4, float(ms[-1] - ms[0]) / (sizes[-1] - sizes[0]))
            line += rise * np.maximum(grid - sizes[-1], 0)
            self._table = StepTable(tuple(grid.tolist()), tuple(line.tolist()))
        return self._table


def _rising(values: list[float], weights: list[int]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators, weighted squares): one step
    that another process slowed down must not make every larger size look slow."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, entries
    for value, weight in zip(values, weights, strict=True):
        mean, total, entries = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, mass, count = pools.pop()
            mean = (before * mass + mean * total) / (mass + total)
            total, entries = total + mass, entries + count
        pools.append((mean, total, entries))
    return [mean for mean, _, entries in pools for _ in range(entries)]
