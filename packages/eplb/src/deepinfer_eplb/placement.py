"""Placements: maps of one, the one before any load is known, and how much of one another keeps."""

from __future__ import annotations

from collections.abc import Sequence
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


def keep_ranks(old: npt.NDArray[Any], new: npt.NDArray[Any], num_gpus: int) -> npt.NDArray[Any]:
    """Rename the ranks of `new` so that most experts stay: pairs of largest overlap first.

    old: int [S or another number], -1 where a slot held nothing; new: int [S].
    """
    held, wanted = old.reshape(num_gpus, -1), new.reshape(num_gpus, -1)
    top = int(max(old.max(initial=0), new.max(initial=0))) + 2  # one for "nothing"
    rank = np.arange(num_gpus)[:, None] * top + 1
    counts = [
        np.bincount((rank + rows).ravel(), minlength=num_gpus * top).reshape(num_gpus, top)[:, 1:]
        for rows in (held, wanted)
    ]
    overlap = np.minimum(counts[0][:, None, :], counts[1][None, :, :]).sum(axis=2)
    out = np.empty_like(wanted)
    for _ in range(num_gpus):
        to, source = divmod(int(overlap.argmax()), num_gpus)
        out[to] = wanted[source]
        overlap[to], overlap[:, source] = -1, -1
    return out.ravel()


def keep_slots(old: npt.NDArray[Any], new: npt.NDArray[Any], num_gpus: int) -> npt.NDArray[Any]:
    """Reorder `new` inside each rank so that experts that stay keep their slot. [S] -> [S]."""
    C = old.size // num_gpus
    out = new.copy()
    for g in range(num_gpus):
        part = slice(g * C, (g + 1) * C)
        if np.array_equal(old[part], new[part]):
            continue
        waiting = new[part].tolist()
        placed = [-1] * C
        for c, expert in enumerate(old[part].tolist()):
            if expert in waiting:
                waiting.remove(expert)
                placed[c] = expert
        rest = iter(waiting)
        out[part] = [next(rest) if e < 0 else e for e in placed]
    return out


def moved_share(old: npt.NDArray[Any], new: npt.NDArray[Any], num_gpus: int) -> float:
    """Share of slots whose expert was not on that rank before; old may have other slots a rank.

    old: [L, S or another number], -1 where a slot held nothing; new: [L, S].
    """
    L, S = new.shape
    top = int(max(old.max(initial=0), new.max(initial=0))) + 2  # one for "nothing"

    def counts(placement: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        slots = placement.shape[1]
        rank = np.arange(slots) // (slots // num_gpus)
        base = (np.arange(L)[:, None] * num_gpus + rank[None, :]) * top
        return np.bincount((base + placement + 1).ravel(), minlength=L * num_gpus * top)

    return float(np.maximum(counts(new) - counts(old), 0).sum()) / (L * S)


def follow_ranks(
    old: npt.NDArray[Any], old_gpus: int, ranks: Sequence[int]
) -> npt.NDArray[np.int64]:
    """What the ranks of another topology hold: [L, S_old] -> [L, len(ranks) * C_old].

    ranks: for each new rank the old one that it continues, or -1: such a rank holds nothing (-1).
    """
    L = old.shape[0]
    held = old.reshape(L, old_gpus, -1)
    out = np.full((L, len(ranks), held.shape[2]), -1, dtype=np.int64)
    for g, r in enumerate(ranks):
        if r >= 0:
            out[:, g] = held[:, r]
    return out.reshape(L, -1)
