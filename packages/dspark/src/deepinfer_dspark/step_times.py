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
    forget: records after which a size that did not come again is unknown again, so that one slow
            step cannot keep it from being tried for ever (the smallest stays); None: never.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(
        self, top: int, *, slope: float = 0.02, window: int = 9, forget: int | None = None
    ) -> None:
        if top < 1 or not slope >= 0 or window < 1 or (forget is not None and forget < 1):
            raise ShapeError(
                "StepTimes wants top >= 1, slope >= 0, window >= 1 and forget >= 1 or None, got "
                f"{top}, {slope}, {window} and {forget}"
            )
        self._top, self._slope, self._window, self._forget = top, slope, window, forget
        self._count, self._last = 0, dict[int, int]()
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
        self._count += 1
        self._last[tokens] = self._count
        if self._forget is not None:
            smallest, before = min(self._median), self._count - self._forget
            for size in [s for s, at in self._last.items() if at <= before and s != smallest]:
                del self._recent[size], self._median[size], self._last[size]

    @property
    def known(self) -> bool:
        """Whether any step was recorded."""
        return bool(self._median)

    @property
    def largest(self) -> int:
        """The largest size recorded, 0 before the first record."""
        return max(self._median, default=0)

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
