"""Ranks of two or three slots, where one heavy replica and its partner decide.

On moving loads: placing by the peaks of recorded steps, since a variance says too little about the
few in which one replica towers. On loads that stand still: the best of what is at hand, layer by
layer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.evaluation import imbalance, rank_loads, rank_shares
from deepinfer_eplb.placement import keep_ranks, moved_share
from deepinfer_eplb.planning.published import totals_policy
from deepinfer_eplb.planning.scenarios import blocks, scale

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


def place_by_peaks(todo: Int, r: Float, num_gpus: int) -> Int:
    """int64 [G, C]; each replica in turn where the sum over steps of the busiest rank rises least.

    r: [K, E], load of one replica in each step. A rank that already holds the expert is used only
    when no other has an empty slot.
    """
    slots = np.full((num_gpus, todo.size // num_gpus), -1, dtype=np.int64)
    load, peak = np.zeros((r.shape[0], num_gpus)), np.zeros(r.shape[0])
    for e in todo.tolist():
        raised = np.maximum(peak[:, None], load + r[:, e][:, None]).sum(axis=0)
        free = (slots < 0).any(axis=1)
        apart = free & ~(slots == e).any(axis=1)
        g = int(np.where(apart if apart.any() else free, raised, np.inf).argmin())
        slots[g, int((slots[g] < 0).argmax())] = e
        load[:, g] += r[:, e]
        peak = np.maximum(peak, load[:, g])
    return slots


def peaks(slots: Int, steps: Float) -> float:
    """Mean over steps [K, E] of the busiest rank's load under placement [G, C]."""
    n = np.bincount(slots.ravel(), minlength=steps.shape[1])
    return float((steps / n)[:, slots].sum(axis=2).max(axis=1).mean())


STILL_EXCESS: Final = 0.02
"""Change of expert loads along the window up to which it tells what comes: generator traces that
only tremble stay below 0.012, those that walk slowly are above 0.025."""
STILL_BLOCKS: Final = 8


def best_of(made: Int, start: Int | None, loads: Float, num_gpus: int, price: float) -> Int:
    """int64 [L, S]; for every layer `made`, `start` or the open algorithm's placement.

    made, start: [L, S]; loads: [W, L, E], standing still. The one with the least busy busiest rank
    over blocks of the window is taken, a slot that changes its rank's expert costing `price`. Ranks
    are named so that most of `start` stays.
    """
    L, S = made.shape
    rivals = [made, totals_policy(loads, num_gpus, S).astype(np.int64)]
    rivals += [] if start is None else [start]
    steps = scale(blocks(loads, STILL_BLOCKS), num_gpus)
    costs = np.empty((len(rivals), L))
    for k, rival in enumerate(rivals):
        shares = rank_shares(rival.astype(np.int32), loads.shape[2], num_gpus)
        costs[k] = imbalance(rank_loads(steps, shares))[1]
    if start is None:
        return np.stack(rivals)[costs.argmin(axis=0), np.arange(L)]
    out = start.copy()
    for layer in range(L):
        least = costs[-1, layer]
        for k in np.argsort(costs[:-1, layer]).tolist():
            if costs[k, layer] >= least:
                break  # naming ranks takes time, and nothing that follows can win
            named = keep_ranks(start[layer], rivals[k][layer], num_gpus)
            moved = moved_share(start[layer][None], named[None], num_gpus)
            cost = costs[k, layer] + price * S * moved
            if cost < least:
                least, out[layer] = cost, named
    return out
