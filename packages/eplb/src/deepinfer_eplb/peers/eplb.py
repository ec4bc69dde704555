"""Drop-in for the open EPLB entry point, and the same with the placement in force."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_loads, as_numpy, as_placement
from deepinfer_eplb.planning.planner import Plan, plan
from deepinfer_eplb.planning.published import totals_policy
from deepinfer_eplb.planning.totals import busiest


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Drop-in for the open EPLB entry point of the same name; on no layer worse than it.

    weight: [L, E] load totals, torch or numpy, of any number type. Returns (phy2log [L, R], log2phy
    [L, E, X] padded with -1, logcnt [L, E]), int64, torch tensors on the CPU if `weight` was one.
    """
    made = plan(
        weight,
        num_gpus,
        num_replicas,
        num_groups=num_groups,
        num_nodes=num_nodes,
        objective="totals",
    )
    arrays = tuple(a.astype(np.int64) for a in (made.phy2log, made.log2phy, made.logcnt))
    if hasattr(weight, "detach"):
        import torch  # pyright: ignore[reportMissingImports]

        return tuple(torch.from_numpy(a) for a in arrays)  # pyright: ignore[reportReturnType]
    return arrays  # pyright: ignore[reportReturnType]


def rebalance_from(
    weight: Any,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    old: Any | None = None,
) -> npt.NDArray[np.int64]:
    """int64 [L, R]: from the placement in force, moving little; on no layer worse on `weight` than
    the open algorithm, which would move nearly everything.

    old: int [L, R] or of another number of ranks with as many slots each (the first ranks
    continue; -1 in the slots of ranks that just joined); None: from nothing.
    """
    totals = as_loads(weight, "weight")[0]
    options: dict[str, Any] = {"num_groups": num_groups, "num_nodes": num_nodes}
    start = None if old is None else _usable(old, totals.shape, num_replicas // num_gpus)
    if start is None:
        made = plan(totals, num_gpus, num_replicas, objective="totals", **options)
        return made.phy2log.astype(np.int64)
    old_gpus = start.shape[1] // (num_replicas // num_gpus)

    def from_old(layers: npt.NDArray[Any], objective: Any) -> Plan:
        return plan(
            totals[layers], num_gpus, num_replicas, start[layers], old_gpus=old_gpus,
            objective=objective, **options,
        )  # fmt: skip

    out = from_old(np.arange(totals.shape[0]), "steps").phy2log.astype(np.int64)
    limited = num_nodes > 1 and num_groups % num_nodes == 0
    shape = (num_groups, num_nodes) if limited else (1, 1)
    theirs = busiest(totals, totals_policy(totals, num_gpus, num_replicas, *shape), num_gpus)
    worse = np.flatnonzero(busiest(totals, out, num_gpus) > theirs)
    if worse.size:
        out[worse] = from_old(worse, "totals").phy2log
    return out


def _usable(old: Any, shape: tuple[int, ...], slots_per_rank: int) -> npt.NDArray[np.int32] | None:
    """The ranks of `old` that hold something, or None if they do not hold every expert."""
    placed = as_numpy(old)
    if placed.ndim != 2 or placed.shape[0] != shape[0] or slots_per_rank < 1:
        return None
    ranks, rest = divmod(placed.shape[1], slots_per_rank)
    if rest:
        return None
    full = (placed.reshape(shape[0], ranks, slots_per_rank) >= 0).all(axis=(0, 2))
    count = ranks if full.all() else int(full.argmin())
    placed = placed[:, : count * slots_per_rank]
    if count == 0 or any(np.unique(row).size < shape[1] for row in placed):
        return None
    return as_placement(placed, shape[1], "old")
