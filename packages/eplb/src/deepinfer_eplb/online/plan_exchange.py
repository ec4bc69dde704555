"""Rank 0's plan for everybody, in one all-reduce to which the other ranks add zeros."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from deepinfer_eplb.errors import PlanError
from deepinfer_eplb.placement import maps_of
from deepinfer_eplb.planning.planner import Plan
from deepinfer_eplb.rearrange.transport import Transport


def share_plan(
    future: Future[Plan] | None,
    transport: Transport,
    shape: tuple[int, ...],
    num_experts: int,
    num_gpus: int,
) -> Plan:
    """Collective. future: rank 0's plan in the making, None elsewhere; shape: (L, S).

    A failure of the planner is raised on rank 0 as it was and on the others as PlanError, at the
    same step, so that nobody waits in a later collective.
    """
    L, S = shape
    message = np.zeros(7 + L * S, dtype=np.int64)
    failure: BaseException | None = None
    if future is not None:
        failure = future.exception()
        if failure is None:
            made = future.result()
            old_B = np.nan if made.old_B is None else made.old_B
            figures = np.array([made.predicted_B, old_B, made.moved, made.seconds])
            message[0] = 1
            message[1:5] = figures.view(np.int64)
            message[5:7] = made.swaps, made.replica_moves
            message[7:] = made.phy2log.ravel()
    message = transport.all_reduce_sum(message)
    if failure is not None:
        raise failure
    if message[0] != 1:
        raise PlanError("rank 0 could not plan: its own error says why; nothing was moved")
    predicted, old_B, moved, seconds = message[1:5].copy().view(np.float64).tolist()
    phy2log = message[7:].reshape(L, S).astype(np.int32)
    log2phy, logcnt = maps_of(phy2log, num_experts)
    return Plan(
        phy2log=phy2log,
        log2phy=log2phy,
        logcnt=logcnt,
        num_gpus=num_gpus,
        predicted_B=predicted,
        old_B=None if np.isnan(old_B) else old_B,
        moved=moved,
        swaps=int(message[5]),
        replica_moves=int(message[6]),
        seconds=seconds,
    )
