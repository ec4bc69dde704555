"""The masks of a step: one row of bits for every row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_engine.core.runner import MaskRows, RowConstraint

_ALL = np.int32(-1)


def mask_rows(
    constraints: Sequence[RowConstraint | None],
    drafts: npt.NDArray[np.integer[Any]] | None = None,
    lens: npt.NDArray[np.integer[Any]] | None = None,
) -> MaskRows | None:
    """int32 [sum(1 + lens), words] for `Verifier.verify`, None if nobody asks for one.

    drafts: int64 [R, gamma], of which the first lens[r] are verified; None without drafts.
    Rows of sequences without a constraint allow everything.
    """
    words = next((c.mask_words for c in constraints if c is not None), None)
    if words is None:
        return None
    counts = [0] * len(constraints) if lens is None else [int(n) for n in lens]
    rows = np.full((len(counts) + sum(counts), words), _ALL, dtype=np.int32)
    start = 0
    for r, (constraint, count) in enumerate(zip(constraints, counts, strict=True)):
        if constraint is not None:
            own = [] if drafts is None else drafts[r, :count].tolist()
            constraint.fill(rows[start : start + 1 + count], own)
        start += 1 + count
    return rows
