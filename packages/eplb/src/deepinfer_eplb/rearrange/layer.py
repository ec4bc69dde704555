"""One layer's move on one rank, as a transaction: weights and maps switch everywhere or nowhere.

1. Stage: what this rank needs arrives in staging; the live weights are only read.
2. Vote: all ranks learn whether any of them could not stage. If so, nobody switches.
3. Switch: rows of staging and live weights trade places, maps follow, the caller is told.
4. Vote again, then a barrier: a failure before it takes every rank that lives back to the old
   layer, which lies in staging.

A rank may die inside the very last barrier after some ranks left it and before others: no protocol
of a group that loses members can rule that out. Both layers stay at hand then, and the survivors'
next group takes the newest side that any of them reached (`Balancer.settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_numpy
from deepinfer_eplb.errors import CommitError, PlanError, ShapeError, TransportError
from deepinfer_eplb.rearrange.movement import MovementPlan, RankMoves, Transfer
from deepinfer_eplb.rearrange.transport import Transport

Array = npt.NDArray[Any]


def host_rows(weights: Sequence[Any]) -> list[Array]:
    """Arrays that share memory with `weights`, one slot a row, whatever their element type.

    numpy arrays as they are; torch tensors in host memory as bytes [C, row bytes], so that bfloat16
    and quantised types move too. Raises ShapeError for tensors on a device or without rows that lie
    in one piece.
    """
    return [_host(w) for w in weights]


def _host(weight: Any) -> Array:
    if isinstance(weight, np.ndarray):
        if weight.ndim == 0:
            raise ShapeError("weights wants arrays [C, ...], one slot a row; got a single number")
        # a row of a vector would be a copy, not memory to write to
        return weight[:, None] if weight.ndim == 1 else weight
    if not hasattr(weight, "detach"):
        raise ShapeError(
            f"weights wants numpy arrays or torch tensors, got {type(weight).__name__}"
        )
    tensor = weight.detach()
    if tensor.device.type != "cpu":
        raise ShapeError(
            f"weights wants tensors in host memory, got one on {tensor.device}: leave weights out "
            "and move them in on_commit"
        )
    if tensor.ndim == 0 or not tensor.is_contiguous():
        raise ShapeError(
            f"weights wants contiguous tensors [C, ...], got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}: make it contiguous before the model keeps it"
        )
    import torch  # pyright: ignore[reportMissingImports]

    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8).numpy()


def allocate_staging(weights: Sequence[Any]) -> list[Array]:
    """Staging for one layer: reserve it at start, not at the peak. One array a tensor, [C, ...]."""
    # row after row whatever the order of the weights: messages arrive in rows
    return [np.empty(w.shape, w.dtype) for w in host_rows(weights)]


def rearrange_layer(
    moves: MovementPlan, weights: Sequence[Any], staging: Sequence[Array], transport: Transport
) -> int:
    """Move every tensor of a layer's experts as `moves` says; collective over the group.

    weights: arrays or host tensors [C, ...], one slot a row: the matrices and whatever belongs to
    them (scales, biases), so that they change in one transaction, in place. A canary with the
    expert's id travels along. Raises CommitError on every rank if any of them could not take part
    (another expert arrived, no memory), and TransportError if a peer was lost; the weights are the
    old ones then. Returns the number of bytes received.
    """
    change = LayerChange(moves, host_rows(weights), staging, transport)
    change.run()
    return change.received


class LayerChange:
    """One layer's transaction. `run` carries it out, `switch` trades old and new once more.

    received: bytes from peers. staged: whether staging holds the other side, whole.
    """

    def __init__(
        self,
        moves: MovementPlan,
        weights: Sequence[Array],
        staging: Sequence[Array],
        transport: Transport,
    ) -> None:
        C = moves.slots_per_rank
        if len(moves.ranks) != transport.size or any(w.shape[0] != C for w in weights):
            raise ShapeError(
                f"the movement is for {len(moves.ranks)} ranks of {C} slots; got a group of "
                f"{transport.size} and weights with {[w.shape[0] for w in weights]} rows"
            )
        staging = [s[:, None] if s.ndim == 1 else s for s in staging]
        for w, s in zip(weights, staging, strict=True):
            if (w.shape, w.dtype) != (s.shape, s.dtype) or not s.flags.c_contiguous:
                raise ShapeError(
                    f"staging wants contiguous arrays like the weights: {s.dtype} {s.shape} for "
                    f"{w.dtype} {w.shape}; see allocate_staging"
                )
        self._moves, self._transport = moves, transport
        self._live, self._staging = weights, staging
        self.received = 0
        self.staged = False

    def run(
        self, apply: Callable[[], None] | None = None, revert: Callable[[], None] | None = None
    ) -> None:
        """Collective. apply: what follows the weights on this rank (maps, callbacks); revert: what
        takes it back. Either all ranks return with the new layer, or all that live raise with the
        old one."""
        vote(self._transport, "get ready for", self._stage())
        self.staged = True
        switched = False
        failure: Exception | None = None
        try:
            try:
                self.switch()
                switched = True
                if apply is not None:
                    apply()
            except Exception as e:
                failure = e
            vote(self._transport, "switch", failure)
            self._transport.barrier()
        except BaseException:
            if switched:
                self.switch()
                if revert is not None:
                    revert()
            raise

    def switch(self) -> None:
        """Trade the rows of live weights and staging. Whatever it raises, nothing has changed."""
        commit = self._moves.ranks[self._transport.rank].commit
        done: list[tuple[int, int]] = []
        try:
            for i in range(len(self._live)):
                for c in commit:
                    self._trade(i, c)
                    done.append((i, c))
        except BaseException:
            for i, c in done:
                self._trade(i, c)
            raise

    def _trade(self, i: int, c: int) -> None:
        live, staging = self._live[i], self._staging[i]
        kept = live[c].copy()
        live[c] = staging[c]
        try:
            staging[c] = kept
        except BaseException:
            live[c] = kept
            raise

    def _stage(self) -> Exception | None:
        """Fill staging; a fault of this rank is returned, so that no peer waits for it in vain."""
        moves = self._moves
        C, rank = moves.slots_per_rank, self._transport.rank
        me = moves.ranks[rank]
        held, wanted = moves.old.reshape(-1, C)[rank], moves.new.reshape(-1, C)[rank]
        failure, self.received = carry_out(
            me, held, wanted, self._live, self._staging, self._transport
        )
        return failure


def carry_out(
    me: RankMoves,
    held: npt.NDArray[Any],
    wanted: npt.NDArray[Any],
    source: Sequence[Array],
    target: Sequence[Array],
    transport: Transport,
    missing: Sequence[tuple[int, int]] = (),
    load: Callable[[int], Sequence[Any]] | None = None,
) -> tuple[Exception | None, int]:
    """One rank's part of a movement from `source` arrays into `target` arrays.

    held, wanted: expert of each source and target row. missing: (expert, target row) that no rank
    holds; load: gives such an expert's row of every target.

    Returns (fault of this rank or None, bytes received). A fault is returned and not raised, so
    that no peer waits in vain; only a fault of the transport is raised, as TransportError.
    """
    canary = np.asarray(held, dtype=np.int64).reshape(-1, 1)
    arrived = np.full((len(wanted), 1), -1, dtype=np.int64)
    sources, targets = [*source, canary], [*target, arrived]
    failure: Exception | None = None
    try:
        for src, dst in me.copies:
            for a, b in zip(sources, targets, strict=True):
                b[dst] = a[src]
    except Exception as e:
        failure = e
    received = 0
    try:
        for bucket in me.buckets:
            received += _exchange(bucket, sources, targets, transport)
    except TransportError:
        raise
    except Exception as e:
        # messages may be left half way: this group cannot go on
        raise TransportError(f"batch_p2p failed on rank {transport.rank}: {e!r}") from e
    try:
        for expert, slot in missing:
            _load(expert, slot, target, load)
            arrived[slot, 0] = expert
        for src, dst in me.final_copies:
            for b in targets:
                b[dst] = b[src]
    except Exception as e:
        failure = e
    return failure or _wrong(me, wanted, arrived), received


def _load(
    expert: int, slot: int, target: Sequence[Array], load: Callable[[int], Sequence[Any]] | None
) -> None:
    if load is None:
        raise PlanError(f"no rank holds expert {expert} any more, and no load was given")
    for b, row in zip(target, load(expert), strict=True):
        # a tensor's row for a target that is a tensor's bytes; see host_rows
        as_bytes = hasattr(row, "detach") and b.dtype == np.uint8
        values = _host(row.cpu().reshape(1, -1))[0] if as_bytes else as_numpy(row)
        b[slot] = values.reshape(b[slot].shape)


def _exchange(
    bucket: Sequence[Transfer], sources: list[Array], targets: list[Array], transport: Transport
) -> int:
    sends: list[tuple[int, Array]] = []
    receives: list[tuple[int, Array]] = []
    for t in bucket:
        if t.src == transport.rank:
            sends += [(t.dst, np.ascontiguousarray(a[t.src_slot]).reshape(-1)) for a in sources]
        else:
            receives += [(t.src, b[t.dst_slot].reshape(-1)) for b in targets]
    transport.batch_p2p(sends, receives)
    return sum(buffer.nbytes for _, buffer in receives)


def _wrong(me: RankMoves, wanted: npt.NDArray[Any], arrived: Array) -> Exception | None:
    for c in me.commit:
        if int(arrived[c, 0]) != int(wanted[c]):
            return TransportError(
                f"slot {c} received expert {int(arrived[c, 0])}, not {int(wanted[c])} as planned"
            )
    return None


def vote(transport: Transport, what: str, failure: Exception | None) -> None:
    """Raise CommitError on every rank if one has a failure; collective."""
    count = np.array([failure is not None], dtype=np.int64)
    failed = int(transport.all_reduce_sum(count)[0])
    if failed:
        raise CommitError(
            f"{failed} of {transport.size} ranks could not {what} a layer"
            + ("" if failure is None else f"; here: {failure!r}")
            + ": no weight was changed"
        ) from failure
