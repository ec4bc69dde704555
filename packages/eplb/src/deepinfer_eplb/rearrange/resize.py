"""Carry out the movement of one layer between topologies, from its old arrays into new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_eplb.errors import ShapeError
from deepinfer_eplb.rearrange.layer import carry_out, host_rows, vote
from deepinfer_eplb.rearrange.movement import ResizePlan
from deepinfer_eplb.rearrange.transport import Transport


def resize_layer(
    moves: ResizePlan,
    old_weights: Sequence[Any],
    new_weights: Sequence[Any],
    transport: Transport,
    load: Callable[[int], Sequence[Any]] | None = None,
) -> int:
    """Fill `new_weights` as `moves` says; collective over the processes that take part.

    old_weights: arrays or host tensors [C, ...] of this process as it serves now, only read; empty
    for a newcomer. new_weights: arrays [C', ...] of the same rows; empty for one that leaves.
    load: gives the rows of an expert that only lost ranks held, one a tensor (from a checkpoint;
    torch tensors as bytes, see `host_rows`). Raises CommitError on every process if one could not,
    TransportError if a peer was lost: the old weights are whole then, and the layer can be asked
    for again. On return the new ones are whole everywhere: use them. Returns bytes received.
    """
    old, new = host_rows(old_weights), host_rows(new_weights)
    if len(moves.ranks) != transport.size:
        raise ShapeError(
            f"the movement is for {len(moves.ranks)} processes, the group has {transport.size}"
        )
    rank = transport.rank
    me, held, wanted = moves.ranks[rank], moves.old[rank], moves.new[rank]
    fill, hold = bool((wanted >= 0).any()), bool((held >= 0).any())
    for name, rows, used, slots in (
        ("new_weights", new, fill, wanted.size),
        ("old_weights", old, hold, held.size),
    ):
        if used and (not rows or any(w.shape[0] != slots for w in rows)):
            raise ShapeError(
                f"{name} wants arrays of {slots} slots here, got {[w.shape for w in rows]}"
            )
    if fill and not all(w.flags.c_contiguous and w.flags.writeable for w in new):
        raise ShapeError("new_weights wants contiguous arrays that can be written")
    if (
        fill
        and hold
        and [(w.shape[1:], w.dtype) for w in old] != [(w.shape[1:], w.dtype) for w in new]
    ):
        raise ShapeError("new_weights wants the rows and types of old_weights")
    failure, received = carry_out(
        me, held, wanted, old, new, transport, missing=moves.load[rank], load=load
    )
    vote(transport, "fill", failure)
    transport.barrier()
    return received
