"""Maps of a placement, and the placement to start from before any load is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_placement, check_count, replica_counts


def maps_of(phy2log: Any, num_experts: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(log2phy int32 [L, E, X], logcnt int32 [L, E]) of a placement int [L, S].

    Raises ShapeError or PlanError for what is no placement of that many experts.
    """
    check_count("num_experts", num_experts)
    phy2log = as_placement(phy2log, num_experts, "phy2log")
    L, S = phy2log.shape
    logcnt = replica_counts(phy2log, num_experts)
    order = np.argsort(phy2log, axis=1, kind="stable")
    experts = np.take_along_axis(phy2log, order, axis=1)
    first = np.cumsum(logcnt, axis=1) - logcnt
    within = np.arange(S)[None, :] - np.take_along_axis(first, experts, axis=1)
    log2phy = np.full((L, num_experts, int(logcnt.max(initial=1))), -1, dtype=np.int32)
    log2phy[np.arange(L)[:, None], experts, within] = order
    return log2phy, logcnt


def initial_placement(layers: int, num_experts: int, num_slots: int) -> npt.NDArray[np.int32]:
    """Experts in order, then redundant slot i holds expert i mod E. int32 [L, S]."""
    return np.tile(np.arange(num_slots, dtype=np.int32) % num_experts, (layers, 1))


def slots_for(num_experts: int, redundant: int, num_gpus: int) -> int:
    """The smallest number of slots >= num_experts + redundant that all ranks share equally."""
    check_count("num_experts", num_experts)
    check_count("redundant", redundant, 0)
    check_count("num_gpus", num_gpus)
    return -(-(num_experts + redundant) // num_gpus) * num_gpus
