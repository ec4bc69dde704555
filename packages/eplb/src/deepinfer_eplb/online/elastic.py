"""Ranks join, leave or are lost: a plan for the new number of them, the same on every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_placement, check_count, check_topology
from deepinfer_eplb.errors import PlanError, TopologyError
from deepinfer_eplb.online.plan_task import FAILED, PlanTask, ask, share
from deepinfer_eplb.online.window import LoadWindow
from deepinfer_eplb.planning.planner import Plan, plan
from deepinfer_eplb.rearrange.transport import Transport


def replan(
    transport: Transport,
    layers: int,
    experts: int,
    num_gpus: int,
    num_slots: int,
    ranks: Sequence[int],
    *,
    old_gpus: int,
    old: Any | None = None,
    window: LoadWindow | None = None,
    **options: Any,
) -> tuple[npt.NDArray[np.int32], Plan]:
    """Collective over the new ranks (first, in order) and those that leave.

    ranks: for each new rank the rank of the old topology that it continues, -1 for a newcomer; the
    first has to be one that continues, it plans. old, window: placement in force and recorded
    loads; None at newcomers. options: further arguments of `plan`. Returns (old placement, plan),
    equal on all processes; carry them out with `resize` and `resize_layer`, then make a Balancer
    with `initial=plan.phy2log`. Raises PlanError everywhere if there can be no plan.
    """
    check_count("old_gpus", old_gpus)
    check_topology(experts, num_gpus, num_slots)
    if len(ranks) != num_gpus or ranks[0] == -1:
        raise TopologyError(
            f"ranks wants {num_gpus} old ranks or -1, the first one that continues; got {[*ranks]}"
        )
    first = transport.rank == 0
    if first and (old is None or window is None):
        raise PlanError("the first rank gives old and window: it makes the plan")
    before = None if old is None else as_placement(old, experts, "old")
    own = np.zeros((0, layers, experts), dtype=np.int64) if window is None else window.snapshot()
    sizes = np.zeros(2 + transport.size, dtype=np.int64)
    if first and before is not None:
        sizes[:2] = before.shape
    sizes[2 + transport.rank] = own.shape[0]
    sizes = transport.all_reduce_sum(sizes)
    placed = np.zeros((int(sizes[0]), int(sizes[1])), dtype=np.int64)
    if first and before is not None:
        placed += before
    placed = transport.all_reduce_sum(placed).astype(np.int32)
    loads = np.zeros((int(sizes[2:].max()), layers, experts), dtype=np.int64)
    loads[loads.shape[0] - own.shape[0] :] = own
    loads = transport.all_reduce_sum(loads)
    if not loads.any():
        loads = np.ones((1, layers, experts), dtype=np.int64)  # nothing known: as if all equal

    def make() -> tuple[Plan, bool]:
        made = plan(loads, num_gpus, num_slots, placed, old_gpus=old_gpus, ranks=ranks, **options)
        return made, True

    task = PlanTask(make, lambda run: run()) if first else None
    if ask(task, transport) == FAILED:
        why = "" if task is None else f": {task.error!r}"
        raise PlanError(f"the first rank could not plan for {num_gpus} ranks{why}")
    made, _ = share(task, transport, (layers, num_slots), experts, num_gpus)
    return placed, made
