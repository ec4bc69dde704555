"""Plans of sums: never worse on them than the open EPLB algorithm, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.planning.published import totals_layer

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


def busiest(totals: Float, placement: npt.NDArray[Any], num_gpus: int) -> Float:
    """float64 [L]; load of the busiest rank of each layer. totals [L, E], placement [L, S]."""
    L, S = placement.shape
    loads = np.empty(L)
    for layer in range(L):
        row = placement[layer]
        n = np.bincount(row, minlength=totals.shape[1])
        share = totals[layer][row] / n[row]
        loads[layer] = share.reshape(num_gpus, S // num_gpus).sum(axis=1).max()
    return loads


def never_worse(
    made: Int,
    totals: Float,
    num_gpus: int,
    groups: int,
    nodes: int,
    again: Callable[[Int | None], Int],
) -> Int:
    """The layer `made` [S], or a better one where the published algorithm beats it on totals [E].

    again: the planner once more, from a placement to start from, or from none.
    """
    published = totals_layer(totals, num_gpus, made.size, groups, nodes)
    both = busiest(np.stack([totals] * 2), np.stack([made, published]), num_gpus)
    if both[0] <= both[1]:
        return made
    rivals = np.stack([again(None), again(published), published])
    at = int(busiest(np.stack([totals] * 3), rivals, num_gpus).argmin())
    return rivals[at]
