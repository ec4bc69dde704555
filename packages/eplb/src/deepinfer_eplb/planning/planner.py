"""`plan`: where the replicas of every expert go, from recorded loads and the placement in force."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_loads, as_placement, check_count, check_topology
from deepinfer_eplb.errors import ShapeError, TopologyError
from deepinfer_eplb.evaluation import imbalance, rank_loads, rank_shares
from deepinfer_eplb.placement import follow_ranks, keep_ranks, keep_slots, maps_of, moved_share
from deepinfer_eplb.planning.hierarchy import check_nodes, layer_by_nodes
from deepinfer_eplb.planning.load_model import MOVING_EXCESS, LoadModel, fit
from deepinfer_eplb.planning.narrow import STILL_EXCESS, best_of
from deepinfer_eplb.planning.scenarios import blocks, moving_excess, scale
from deepinfer_eplb.planning.solver import NARROW_SLOTS, Solver
from deepinfer_eplb.planning.totals import never_worse

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

STEADY_SHARE: Final = 0.125
MOVING_SHARE: Final = 0.29
"""Share of slots that one plan may change, on loads that hardly move (beyond it a plan follows
noise) and on loads that do."""
FEW_SWAPS: Final = 8
"""Swaps that small groups may always make, whatever share of the slots they are."""
PRICE: Final = 1e-5
"""Relative imbalance of its layer that a changed slot must win: about what moving 13 MB at 5 GB/s
costs a group over 10,000 steps of 20 ms in MoE layers."""
FRESH_FACTOR: Final = 4
JUDGED_LAYERS: Final = 8
JUDGED_BLOCKS: Final = 4
JUDGED_OF: Final = 16


@dataclass(frozen=True)
class Plan:
    """A placement of every layer.

    phy2log: int32 [L, S]; slot s lies on rank s // (S // num_gpus).
    log2phy: int32 [L, E, X]; slots of each expert in rising order, -1 padded, X = most replicas.
    logcnt:  int32 [L, E]; replicas of each expert.
    predicted_B: imbalance expected on unseen steps, judged on the last quarter of the window with
             plans made without it, on a sample of the layers.
    old_B:   the same of the old placement; None without one, or of another number of ranks.
    moved:   share of slots whose expert comes from another rank (1 without an old placement).
    swaps, replica_moves: changes that the search made, over all layers.
    seconds: wall time of planning; not part of equality.
    """

    phy2log: npt.NDArray[np.int32]
    log2phy: npt.NDArray[np.int32]
    logcnt: npt.NDArray[np.int32]
    num_gpus: int
    predicted_B: float  # noqa: N815 the literature's symbol
    old_B: float | None  # noqa: N815
    moved: float
    swaps: int
    replica_moves: int
    seconds: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Request:
    num_gpus: int
    num_slots: int
    groups: int
    nodes: int
    totals: bool
    scenarios: int | None
    max_swaps: int
    deadline: float | None

    @property
    def narrow(self) -> bool:
        return self.num_slots // self.num_gpus <= NARROW_SLOTS


def plan(
    window: Any,
    num_gpus: int,
    num_slots: int,
    old: Any | None = None,
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
    objective: Literal["steps", "totals"] = "steps",
    scenarios: int | Literal["auto"] = "auto",
    max_swaps: int = 64,
    time_limit_s: float | None = None,
    seed: int = 0,
    fresh: bool = False,
    old_gpus: int | None = None,
    ranks: Sequence[int] | None = None,
) -> Plan:
    """Plan placements for all layers; the same input gives the same bytes in every process.

    (Machines with different linear algebra libraries may differ in the last bit of a load and so
    in a tie: a group plans on one rank and spreads the result, as `Balancer` does.)

    window:     [W, L, E] assignments of each logical expert in W recorded steps (or [L, E]).
    num_slots:  physical experts a layer over all ranks, a multiple of num_gpus, >= E.
    old:        int [L, S], the placement in force: the plan starts from it and moves little. With
                up to 3 slots a rank it is made anew where that pays for the move.
    num_groups, num_nodes: when num_groups is a multiple of num_nodes > 1, whole expert groups
                stay inside a node (group-limited routing). Otherwise the plan is global and
                prefers moves inside a node, which cost an eighth of those between nodes.
    objective:  "steps" balances typical steps, "totals" only sums over the window: no layer's
                busiest rank is then worse than the open EPLB algorithm's.
    scenarios:  most blocks the window is cut into to tell change from noise; "auto" = 50, or 100
                when loads move.
    max_swaps:  most swaps a layer (of two experts) from an old placement; four times as many from
                nothing. Steady loads stop earlier.
    time_limit_s: stop improving further layers after this long; gives up reproducibility.
    seed:       0 breaks ties by the lowest expert id; others by a seeded order of experts.
    fresh:      plan from empty ranks although `old` is given (a first plan, another workload):
                ranks and slots are then named so that as much as possible stays.
    old_gpus:   number of ranks of `old`, where it was another (ranks joined, left or were lost).
    ranks:      for each of the num_gpus ranks the rank of `old` that it continues, -1 for one that
                starts empty; None: the first ranks continue. The plan keeps what they hold, fills
                what is free and then moves as little as from any old placement.

    Raises ShapeError, LoadError, TopologyError or PlanError for input that does not fit.
    """
    started = time.perf_counter()
    loads = as_loads(window)
    _, L, E = loads.shape
    check_topology(E, num_gpus, num_slots)
    if objective not in ("steps", "totals"):
        raise ShapeError(f"objective is 'steps' or 'totals', got {objective!r}")
    check_count("max_swaps", max_swaps, 0)
    if scenarios != "auto":
        check_count("scenarios", scenarios)
    check_count("num_groups", num_groups)
    check_count("num_nodes", num_nodes)
    check_count("seed", seed, 0)
    before = None if old is None else as_placement(old, E, "old")
    resized = before is not None and (old_gpus not in (None, num_gpus) or ranks is not None)
    if before is not None and resized:
        before = _followed(before, L, num_gpus, num_gpus if old_gpus is None else old_gpus, ranks)
    elif before is not None and before.shape != (L, num_slots):
        raise ShapeError(
            f"old wants shape {(L, num_slots)}, got {before.shape}; for another number of ranks "
            "say old_gpus"
        )
    relabel = np.arange(E) if seed == 0 else np.random.default_rng(seed).permutation(E)
    start = None if before is None else np.where(before < 0, -1, np.argsort(relabel)[before])
    if seed != 0:
        loads = loads[:, :, relabel]

    limited = num_nodes > 1 and num_groups % num_nodes == 0
    if limited:
        check_nodes(E, num_gpus, num_slots, num_groups, num_nodes)
    request = _Request(
        num_gpus=num_gpus,
        num_slots=num_slots,
        groups=num_groups if limited else 1,
        nodes=num_nodes if limited or num_gpus % num_nodes == 0 else 1,
        totals=objective == "totals",
        scenarios=None if scenarios == "auto" else int(scenarios),
        max_swaps=max_swaps,
        deadline=None if time_limit_s is None else started + time_limit_s,
    )
    if resized:
        # groups of experts change their nodes then: nothing of the old spread need hold
        fresh = fresh or limited
    ignored = None if fresh or resized else start
    predicted, old_B, fresh = _judge(request, loads, start, fresh, resized)
    out, solver = _solve(request, loads, None if fresh else start, ignored)
    phy2log = relabel[out].astype(np.int32)
    if before is not None and fresh and not limited:
        phy2log = _keep_ranks(before, phy2log, num_gpus)
    if before is not None and before.shape == phy2log.shape:
        phy2log = np.stack(
            [keep_slots(a, b, num_gpus) for a, b in zip(before, phy2log, strict=True)]
        )
    log2phy, logcnt = maps_of(phy2log, E)
    return Plan(
        phy2log=phy2log,
        log2phy=log2phy,
        logcnt=logcnt,
        num_gpus=num_gpus,
        predicted_B=predicted,
        old_B=old_B,
        moved=1.0 if before is None else moved_share(before, phy2log, num_gpus),
        swaps=solver.swaps,
        replica_moves=solver.moves,
        seconds=time.perf_counter() - started,
    )


@cache
def warm_up() -> None:
    """Load or compile the kernels now, once a process, and not when the first plan is due."""
    window = np.ones((4, 1, 4))
    plan(window, 2, 6, np.array([[0, 1, 2, 3, 0, 1]]))
    plan(window, 3, 6, np.array([[0, 1, 2, 3, 0, 1]]))


def _solve(
    request: _Request, loads: Float, start: Int | None, before: Int | None = None
) -> tuple[Int, Solver]:
    """Placements int64 [L, S] of loads [W, L, E], and the solver that counted the moves.

    start: what the search starts from; before: what is in force, where the search ignores it.
    """
    model = fit(loads, request.num_gpus, totals=request.totals, blocks=request.scenarios)
    solver = Solver(
        request.num_gpus,
        request.num_slots,
        request.nodes,
        # everything moves in a fresh plan anyway
        price=0.0 if request.totals or start is None else PRICE,
        replica_moves=request.totals,
    )
    budget = _budget(request, model, start is not None)
    out = np.empty((loads.shape[1], request.num_slots), dtype=np.int64)
    sums = loads.sum(axis=0)
    for layer in range(out.shape[0]):
        late = request.deadline is not None and time.perf_counter() > request.deadline
        allowed = 0 if late else budget
        old = None if start is None else start[layer]

        def again(start: Int | None, layer: int = layer, allowed: int = allowed) -> Int:
            if request.groups > 1:
                return layer_by_nodes(solver, model, layer, start, allowed, request.groups)
            return solver.layer(model, layer, start, allowed)

        out[layer] = again(old)
        if request.totals:
            nodes = request.nodes if request.groups > 1 else 1
            out[layer] = never_worse(
                out[layer], sums[layer], request.num_gpus, request.groups, nodes, again
            )
    rivals = request.narrow and not request.totals and request.groups == 1 and budget > 0
    before = start if before is None else before
    serves = before is None or _serves(before, out.shape, loads.shape[2])
    if rivals and serves and moving_excess(loads) <= STILL_EXCESS:
        out = best_of(out, before, loads, request.num_gpus, PRICE)
    return out, solver


def _serves(placement: Int, shape: tuple[int, ...], num_experts: int) -> bool:
    """Whether a placement could stay in force: of this shape, every expert in every layer.

    What ranks of another topology bring along may lack experts, or slots.
    """
    return placement.shape == shape and all(
        np.array_equal(np.unique(layer), np.arange(num_experts)) for layer in placement
    )


def _budget(request: _Request, model: LoadModel, from_old: bool) -> int:
    """Slots of a layer that the search may change."""
    if request.totals:
        return 2 * max(request.max_swaps, 4 * request.num_slots)
    if not from_old:
        return 2 * FRESH_FACTOR * request.max_swaps
    share = MOVING_SHARE if model.moving else STEADY_SHARE
    return 2 * min(request.max_swaps, max(FEW_SWAPS, int(share * request.num_slots / 2)))


def _followed(
    old: npt.NDArray[np.int32], L: int, num_gpus: int, old_gpus: int, ranks: Sequence[int] | None
) -> Int:
    """What the new ranks hold of `old`, [L, num_gpus * its slots a rank], -1 for nothing."""
    check_count("old_gpus", old_gpus)
    if old.shape[0] != L or old.shape[1] % old_gpus:
        raise ShapeError(
            f"old wants {L} layers and slots that {old_gpus} old_gpus share, got {old.shape}"
        )
    if ranks is None:
        ranks = [r if r < old_gpus else -1 for r in range(num_gpus)]
    for r in ranks:
        check_count("ranks", r, -1)
    continued = [int(r) for r in ranks if r != -1]
    if len(ranks) != num_gpus or len(set(continued)) != len(continued):
        raise TopologyError(f"ranks wants {num_gpus} old ranks, each once, or -1; got {[*ranks]}")
    if continued and not 0 <= min(continued) <= max(continued) < old_gpus:
        raise TopologyError(f"ranks wants old ranks 0..{old_gpus - 1} or -1, got {[*ranks]}")
    return follow_ranks(old, old_gpus, ranks)


def _judge(
    request: _Request, loads: Float, start: Int | None, fresh: bool, resized: bool
) -> tuple[float, float | None, bool]:
    """(B on the last blocks of plans made without them, B of the old placement or None, fresh).

    Where one heavy replica and its partner decide, swaps of two experts seldom lead from one good
    pairing to another: on steady loads such ranks are planned from nothing too, which wins if it
    gains enough on the held-out blocks for the slots it changes more.
    """
    W, L, E = loads.shape
    sample = np.unique(np.linspace(0, L - 1, min(L, JUDGED_LAYERS)).astype(np.int64))
    part = loads[:, sample]
    held, train = blocks(part, 1), part
    if W >= JUDGED_OF:
        held = blocks(part, JUDGED_OF)[-JUDGED_BLOCKS:]
        train = part[: W * (JUDGED_OF - JUDGED_BLOCKS) // JUDGED_OF]
    judge = scale(held, request.num_gpus)

    def judged(placement: Int) -> float:
        shares = rank_shares(placement.astype(np.int32), E, request.num_gpus)
        return imbalance(rank_loads(judge, shares))[0]

    before = None if start is None else start[sample]
    made, _ = _solve(request, train, None if fresh else before)
    predicted = judged(made)
    if before is None or resized:
        return predicted, None, fresh
    steady = moving_excess(loads) <= MOVING_EXCESS
    if not fresh and not request.totals and request.groups == 1 and request.narrow and steady:
        anew, _ = _solve(request, train, None, before)
        kept = _keep_ranks(before, anew, request.num_gpus)
        more = moved_share(before, kept, request.num_gpus) - moved_share(
            before, made, request.num_gpus
        )
        gain = predicted - judged(anew)
        if gain > PRICE * request.num_slots * more:
            predicted, fresh = predicted - gain, True
    return predicted, judged(before), fresh


def _keep_ranks(
    before: npt.NDArray[Any], after: npt.NDArray[Any], num_gpus: int
) -> npt.NDArray[Any]:
    return np.stack([keep_ranks(a, b, num_gpus) for a, b in zip(before, after, strict=True)])
