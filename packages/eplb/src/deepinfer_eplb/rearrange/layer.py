"""Carry out the movement of one layer on one rank, through a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.errors import ShapeError, TransportError
from deepinfer_eplb.rearrange.movement import MovementPlan
from deepinfer_eplb.rearrange.transport import Transport

Array = npt.NDArray[Any]


def allocate_staging(weights: Sequence[Array]) -> list[Array]:
    """Staging for one layer: reserve it at start, not at the peak. One array a tensor, [C, ...]."""
    return [np.empty_like(w) for w in weights]


def rearrange_layer(
    moves: MovementPlan, weights: Sequence[Array], staging: Sequence[Array], transport: Transport
) -> int:
    """Move every tensor of a layer's experts as `moves` says; collective over the group.

    weights: arrays [C, ...], one slot a row: the matrices and whatever belongs to them (scales,
    biases), so that they change in one transaction. They are overwritten in place and only after
    every rank has received everything. A canary with the expert's id travels along; if what
    arrives is another expert, TransportError is raised and the live weights are untouched.
    Returns the number of bytes received.
    """
    C, me = moves.slots_per_rank, moves.ranks[transport.rank]
    if len(moves.ranks) != transport.size or any(w.shape[0] != C for w in weights):
        raise ShapeError(
            f"the movement is for {len(moves.ranks)} ranks of {C} slots; got a group of "
            f"{transport.size} and weights with {[w.shape[0] for w in weights]} rows"
        )
    held = moves.old.reshape(-1, C)[transport.rank]
    canary = held.astype(np.int64).reshape(C, 1)
    arrived = np.full((C, 1), -1, dtype=np.int64)
    live, stage = [*weights, canary], [*staging, arrived]
    for src, dst in me.copies:
        for a, b in zip(live, stage, strict=True):
            b[dst] = a[src]
    received = 0
    for bucket in me.buckets:
        sends: list[tuple[int, Array]] = []
        receives: list[tuple[int, Array]] = []
        for t in bucket:
            if t.src == transport.rank:
                sends += [(t.dst, np.ascontiguousarray(a[t.src_slot]).reshape(-1)) for a in live]
            else:
                receives += [(t.src, b[t.dst_slot].reshape(-1)) for b in stage]
        transport.batch_p2p(sends, receives)
        received += sum(buffer.nbytes for _, buffer in receives)
    for src, dst in me.final_copies:
        for b in stage:
            b[dst] = b[src]
    wanted = moves.new.reshape(-1, C)[transport.rank]
    wrong = [c for c in me.commit if int(arrived[c, 0]) != int(wanted[c])]
    # everybody learns of a failure before anybody overwrites a weight
    failed = int(transport.all_reduce_sum(np.array([len(wrong)], dtype=np.int64))[0])
    if failed:
        raise TransportError(
            f"{failed} slots of the group received another expert than planned"
            + (f"; here slot {wrong[0]} got {int(arrived[wrong[0], 0])}" if wrong else "")
            + ": no weight was changed"
        )
    for c in me.commit:
        for a, b in zip(weights, staging, strict=True):
            a[c] = b[c]
    return received
