"""From one placement to another: who sends which expert to whom, in an order that cannot hang.

Everything is a pure function of (old, new), so both ends of a transfer compute the same pairing.
Weights arrive in a staging buffer of one layer and go live together: no slot is overwritten while
somebody may still read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_ints, check_count
from deepinfer_eplb.errors import PlanError, ShapeError, TopologyError

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
    C = before.size // num_gpus
    node = ranks_per_node or num_gpus
    held, wanted = before.reshape(num_gpus, C), after.reshape(num_gpus, C)
    holders = _first_slots(held)
    copies: list[list[tuple[int, int]]] = [[] for _ in range(num_gpus)]
    final: list[list[tuple[int, int]]] = [[] for _ in range(num_gpus)]
    receivers: dict[int, list[tuple[int, int]]] = {}
    for g in range(num_gpus):
        arriving: dict[int, int] = {}
        own = {e: c for c, e in reversed(list(enumerate(held[g].tolist())))}
        for c in np.flatnonzero(held[g] != wanted[g]).tolist():
            expert = int(wanted[g, c])
            if expert in own:
                copies[g].append((own[expert], c))
            elif expert in arriving:
                final[g].append((arriving[expert], c))
            elif expert not in holders:
                raise PlanError(f"new wants expert {expert} on rank {g}, but no rank holds it")
            else:
                arriving[expert] = c
                receivers.setdefault(expert, []).append((g, c))
    per_rank: list[list[list[Transfer]]] = [[[] for _ in range(buckets)] for _ in range(num_gpus)]
    transfers = [
        t
        for expert in sorted(receivers)
        for t in _serve(expert, receivers[expert], holders[expert], node)
    ]
    transfers.sort(key=lambda t: (t.src, t.dst, t.expert, t.dst_slot))
    for t in transfers:
        for g in {t.src, t.dst}:
            per_rank[g][(t.src - t.dst) % buckets].append(t)
    return MovementPlan(
        old=before,
        new=after,
        ranks=tuple(
            RankMoves(
                copies=tuple(copies[g]),
                buckets=tuple(tuple(b) for b in per_rank[g]),
                final_copies=tuple(final[g]),
                commit=tuple(np.flatnonzero(held[g] != wanted[g]).tolist()),
            )
            for g in range(num_gpus)
        ),
    )


def _first_slots(held: Int) -> dict[int, list[tuple[int, int]]]:
    """expert -> (rank, first slot there) of every rank that holds it, in rank order."""
    out: dict[int, list[tuple[int, int]]] = {}
    for g, row in enumerate(held.tolist()):
        for c, expert in enumerate(row):
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
