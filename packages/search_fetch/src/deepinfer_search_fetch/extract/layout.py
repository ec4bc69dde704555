"""A page tree as arrays: which boxes hold which runs; a total over a box is one subtraction.

Runs are in document order, so what lies below a box is an interval of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_search_fetch.extract.tree import Box, Run

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Boxes that hold runs; a parent stands before its children, the root is 0.

    parent, depth, first, last: int64 [boxes]; box b holds runs first[b] .. last[b] - 1.
    box_of: int64 [runs], the innermost box of a run.
    """

    boxes: list[Box]
    parent: Ints
    depth: Ints
    first: Ints
    last: Ints
    box_of: Ints

    def below(self, values: Floats) -> Floats:
        """values: float64 [runs] or [runs, k]; their sums over every box, [boxes] or [boxes, k]."""
        total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
        return total[self.last] - total[self.first]

    def ancestors(self, levels: int) -> list[Ints]:
        """Of every run its box, that box's parent, and so on; the root is its own parent."""
        chain = [self.box_of]
        for _ in range(levels - 1):
            chain.append(np.maximum(self.parent[chain[-1]], 0))
        return chain

    def child_towards(self, box: int) -> Ints:
        """int64 [boxes]: the child of `box` that a box lies in (itself where it is not below)."""
        parent = self.parent.tolist()
        top = list(range(len(parent)))
        for b in range(box + 1, len(parent)):
            above = parent[b]
            if above > box and self.first[box] <= self.first[b] < self.last[box]:
                top[b] = top[above]
        return np.array(top, dtype=np.int64)


def lay_out(runs: Sequence[Run]) -> Layout:
    """The layout of at least one run."""
    index: dict[Box, int] = {}
    boxes: list[Box] = []
    parent: list[int] = []
    first: list[int] = []
    last: list[int] = []
    box_of: list[int] = []
    for i, run in enumerate(runs):
        fresh: list[Box] = []
        box: Box | None = run.box
        while box is not None and box not in index:
            fresh.append(box)
            box = box.parent
        for new in reversed(fresh):
            parent.append(index[new.parent] if new.parent is not None else -1)
            index[new] = len(boxes)
            boxes.append(new)
            first.append(i)
            last.append(i)
        box_of.append(index[run.box])
        b = box_of[-1]
        while b >= 0:
            last[b] = i + 1
            b = parent[b]
    return Layout(
        boxes,
        np.array(parent, dtype=np.int64),
        np.array([b.depth for b in boxes], dtype=np.int64),
        np.array(first, dtype=np.int64),
        np.array(last, dtype=np.int64),
        np.array(box_of, dtype=np.int64),
    )
