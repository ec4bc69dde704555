"""Placing by the peaks of recorded steps: for ranks of two or three slots on moving loads.

There the few steps in which one replica towers decide, and a variance says too little about them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
