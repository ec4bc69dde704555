"""From one placement to another: who sends which expert to whom, in an order that cannot hang.

Everything is a pure function of (old, new), so both ends of a transfer compute the same pairing.
Weights arrive in a staging buffer of one layer and go live together: no slot is overwritten while
somebody may still read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_ints, check_count
from deepinfer_eplb.errors import PlanError, ShapeError, TopologyError
from deepinfer_eplb.placement import follow_ranks

Int = npt.NDArray[np.int64]
BUCKETS: Final = 8


@dataclass(frozen=True, slots=True)
class Transfer:
    """One expert from a slot of rank `src` to a slot of rank `dst`; slots count within the rank."""

    src: int
    dst: int
    expert: int
    src_slot: int
    dst_slot: int


@dataclass(frozen=True, slots=True)
class RankMoves:
    """What one rank does for one layer, in this order.

    copies:       (src_slot, dst_slot) live -> staging, experts it already holds.
    buckets:      lists of transfers it takes part in, its own sends and receives; the buckets of
                  all ranks have equal numbers and run one after the other, each as one batch.
    final_copies: (src_slot, dst_slot) staging -> staging, experts received once and needed twice.
    commit:       slots to copy from staging to live once everything above is done everywhere.
    """

    copies: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[Transfer, ...], ...]
    final_copies: tuple[tuple[int, int], ...]
    commit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MovementPlan:
    """Movement of one layer. `old` and `new`: int64 [S]; `ranks[g]` is what rank g does."""

    old: Int
    new: Int
    ranks: tuple[RankMoves, ...]

    @property
    def slots_per_rank(self) -> int:
        return self.old.size // len(self.ranks)

    @property
    def transfers(self) -> list[Transfer]:
        """Every transfer between ranks, once, in global order."""
        count = len(self.ranks[0].buckets) if self.ranks else 0
        out: list[Transfer] = []
        for b in range(count):
            for g, moves in enumerate(self.ranks):
                out += [t for t in moves.buckets[b] if t.src == g]
        return out

    def without_weights(self) -> MovementPlan:
        """The same change where somebody else moves the weights: nothing to send or copy."""
        nothing = RankMoves((), (), (), ())
        return MovementPlan(self.old, self.new, (nothing,) * len(self.ranks))

    def between_nodes(self, ranks_per_node: int) -> int:
        """Transfers that leave their node."""
        return sum(t.src // ranks_per_node != t.dst // ranks_per_node for t in self.transfers)


def movement(
    old: Any, new: Any, num_gpus: int, ranks_per_node: int | None = None, buckets: int = BUCKETS
) -> MovementPlan:
    """Plan the movement of one layer.

    old, new: int [S], slot s on rank s // (S // num_gpus). A receiver is served by a holder of
    its own node if there is one; receivers are spread evenly over the holders they may use.
    Transfers run in `buckets` rounds by (src - dst) mod buckets, which bounds how many peers a
    rank talks to at once. Raises PlanError if `new` needs an expert that `old` does not hold.
    """
    before, after = as_ints(old, "old"), as_ints(new, "new")
    if before.ndim != 1 or before.shape != after.shape:
        raise ShapeError(
            f"movement wants old and new of one shape [S], got {before.shape}, {after.shape}"
        )
    for name, value in (("num_gpus", num_gpus), ("buckets", buckets)):
        check_count(name, value)
    if ranks_per_node is not None:
        check_count("ranks_per_node", ranks_per_node)
    if before.size % num_gpus:
        raise TopologyError(
            f"movement wants S ({before.size}) to be a multiple of num_gpus ({num_gpus})"
        )
    held, wanted = before.reshape(num_gpus, -1), after.reshape(num_gpus, -1)
    changed = [np.flatnonzero(h != w).tolist() for h, w in zip(held, wanted, strict=True)]
    moves, missing = _pair(held, wanted, changed, ranks_per_node or num_gpus, buckets)
    for g, absent in enumerate(missing):
        if absent:
            raise PlanError(f"new wants expert {absent[0][0]} on rank {g}, but no rank holds it")
    return MovementPlan(old=before, new=after, ranks=moves)


def _pair(
    held: Int, wanted: Int, changed: list[list[int]], node: int, buckets: int
) -> tuple[tuple[RankMoves, ...], list[list[tuple[int, int]]]]:
    """(what each rank does to fill its `changed` slots, (expert, slot) that no rank can give it).

    held: [G, C], wanted: [G, C or another number]; -1 for a slot that holds or wants nothing.
    """
    G = held.shape[0]
    holders = _first_slots(held)
    copies: list[list[tuple[int, int]]] = [[] for _ in range(G)]
    final: list[list[tuple[int, int]]] = [[] for _ in range(G)]
    missing: list[list[tuple[int, int]]] = [[] for _ in range(G)]
    receivers: dict[int, list[tuple[int, int]]] = {}
    for g in range(G):
        arriving: dict[int, int] = {}
        own = {e: c for c, e in reversed(list(enumerate(held[g].tolist())))}
        for c in changed[g]:
            expert = int(wanted[g, c])
            if expert in own:
                copies[g].append((own[expert], c))
            elif expert in arriving:
                final[g].append((arriving[expert], c))
            elif expert not in holders:
                arriving[expert] = c
                missing[g].append((expert, c))
            else:
                arriving[expert] = c
                receivers.setdefault(expert, []).append((g, c))
    per_rank: list[list[list[Transfer]]] = [[[] for _ in range(buckets)] for _ in range(G)]
    transfers = [
        t
        for expert in sorted(receivers)
        for t in _serve(expert, receivers[expert], holders[expert], node)
    ]
    transfers.sort(key=lambda t: (t.src, t.dst, t.expert, t.dst_slot))
    for t in transfers:
        for g in {t.src, t.dst}:
            per_rank[g][(t.src - t.dst) % buckets].append(t)
    moves = tuple(
        RankMoves(
            copies=tuple(copies[g]),
            buckets=tuple(tuple(b) for b in per_rank[g]),
            final_copies=tuple(final[g]),
            commit=tuple(changed[g]),
        )
        for g in range(G)
    )
    return moves, missing


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """Movement of one layer between topologies, from arrays of one size into others.

    old: int64 [P, slots a rank before], new: int64 [P, slots a rank after], for the P processes
    that take part: the new ranks in order, then those that leave; -1 where one holds or wants
    nothing. ranks: what each process does; `copies` and receives fill its new arrays. load: for
    each process the (expert, slot) that no process holds any more.
    """

    old: Int
    new: Int
    ranks: tuple[RankMoves, ...]
    load: tuple[tuple[tuple[int, int], ...], ...]


def resize(
    old: Any,
    new: Any,
    old_gpus: int,
    num_gpus: int,
    ranks: Sequence[int] | None = None,
    leaving: Sequence[int] = (),
    ranks_per_node: int | None = None,
    buckets: int = BUCKETS,
) -> ResizePlan:
    """Plan the movement of one layer when ranks join, leave or were lost.

    old: int [old_gpus * C]; new: int [num_gpus * C']. ranks: for each new rank the old one that it
    continues, -1 for a newcomer; None: the first ranks continue. leaving: old ranks that still
    serve as sources (scale down); what only lost ranks held has to be loaded. Processes take part
    in this order: the new ranks, then `leaving`.

    Raises ShapeError for arguments that do not fit, TopologyError for ranks and slots that do not
    fit.
    """
    before, after = as_ints(old, "old"), as_ints(new, "new")
    for name, value in (("old_gpus", old_gpus), ("num_gpus", num_gpus), ("buckets", buckets)):
        check_count(name, value)
    if before.ndim != 1 or after.ndim != 1 or before.size % old_gpus or after.size % num_gpus:
        raise ShapeError(
            f"resize wants old [S] shared by {old_gpus} ranks and new by {num_gpus}, got "
            f"{before.shape}, {after.shape}"
        )
    if ranks is None:
        ranks = [r if r < old_gpus else -1 for r in range(num_gpus)]
    sources = [*ranks, *leaving]
    for r in sources:
        check_count("ranks and leaving", r, -1)
    real = [r for r in sources if r != -1]
    if len(ranks) != num_gpus or len(set(real)) != len(real) or not set(real) <= {*range(old_gpus)}:
        raise TopologyError(
            f"resize wants {num_gpus} ranks (old ones or -1) and others leaving, each once, of "
            f"0..{old_gpus - 1}; got ranks {[*ranks]}, leaving {[*leaving]}"
        )
    held = follow_ranks(before[None], old_gpus, sources).reshape(len(sources), -1)
    wanted = np.full((len(sources), after.size // num_gpus), -1, dtype=np.int64)
    wanted[:num_gpus] = after.reshape(num_gpus, -1)
    changed = [np.flatnonzero(row >= 0).tolist() for row in wanted]
    moves, missing = _pair(held, wanted, changed, ranks_per_node or len(sources), buckets)
    return ResizePlan(held, wanted, moves, tuple(tuple(m) for m in missing))


def _first_slots(held: Int) -> dict[int, list[tuple[int, int]]]:
    """expert -> (rank, first slot there) of every rank that holds it, in rank order."""
    out: dict[int, list[tuple[int, int]]] = {}
    for g, row in enumerate(held.tolist()):
        for c, expert in enumerate(row):
            if expert < 0:
                continue
            known = out.setdefault(expert, [])
            if not known or known[-1][0] != g:
                known.append((g, c))
    return out


def _serve(
    expert: int, receivers: list[tuple[int, int]], holders: list[tuple[int, int]], node: int
) -> list[Transfer]:
    """Pair receivers with holders: own node first, contiguous equal chunks, the rest in turn."""
    groups: dict[int, list[tuple[int, int]]] = {}
    local = {h[0] // node for h in holders}
    for receiver in receivers:
        mine = receiver[0] // node
        groups.setdefault(mine if mine in local else -1, []).append(receiver)
    out: list[Transfer] = []
    for key in sorted(groups):
        sources = [h for h in holders if key < 0 or h[0] // node == key]
        chunk, rest = divmod(len(groups[key]), len(sources))
        owner = [s for s in sources for _ in range(chunk)] + sources[:rest]
        for (dst, dst_slot), (src, src_slot) in zip(groups[key], owner, strict=True):
            out.append(Transfer(src, dst, expert, src_slot, dst_slot))
    return out


def simulate(plan: MovementPlan) -> Int:
    """Run a movement without devices, moving only expert ids; returns the final placement [S].

    It must equal `plan.new`: anything else means a slot was overwritten before it was read.
    """
    G, C = len(plan.ranks), plan.slots_per_rank
    live = plan.old.reshape(G, C).copy()
    staging = np.full((G, C), -1, dtype=np.int64)
    for g, moves in enumerate(plan.ranks):
        for src, dst in moves.copies:
            staging[g, dst] = live[g, src]
    for t in plan.transfers:
        staging[t.dst, t.dst_slot] = live[t.src, t.src_slot]
    for g, moves in enumerate(plan.ranks):
        for src, dst in moves.final_copies:
            staging[g, dst] = staging[g, src]
        for c in moves.commit:
            live[g, c] = staging[g, c]
    return live.ravel()
