"""Drop-in for the open EPLB entry point."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_eplb.planning.planner import plan


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Drop-in for the open EPLB entry point of the same name.

    weight: [L, E] load totals, torch or numpy. Returns (phy2log [L, R], log2phy [L, E, X] padded
    with -1, logcnt [L, E]), int64, torch tensors on the CPU if `weight` was one.
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
