"""`plan`: where the replicas of every expert go, from recorded loads and the placement in force.

Per layer: give out replicas, keep what the old placement already has, fill the holes where the
objective rises least, then swap experts between the costliest rank and others. Without an old
placement the same steps start from empty ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from deepinfer_eplb import kernels_numpy
from deepinfer_eplb.checks import as_loads, as_placement, check_topology, replica_counts
from deepinfer_eplb.errors import ShapeError, TopologyError
from deepinfer_eplb.evaluation import imbalance, rank_loads, rank_shares
from deepinfer_eplb.migration import keep_slots, moved_share
from deepinfer_eplb.scenarios import blocks, make_scenarios, scale

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

SEARCH_Q: Final = 5  # p = 32
PLACE_Q: Final = 3  # p = 8; few slots a rank leave no room to average, so there p is larger
NARROW_PLACE_Q: Final = 5
NARROW_REPLICA_Q: Final = 4
NARROW_SLOTS: Final = 3
STEADY_SHARE: Final = 0.13
MOVING_SHARE: Final = 0.29
"""Share of slots that the swaps of one plan may change, on loads that hardly move (beyond it a
plan follows noise) and on loads that do."""
FEW_SWAPS: Final = 8
JUDGED_LAYERS: Final = 8
JUDGED_BLOCKS: Final = 4
SWAP_PRICE: Final = 2e-5
"""Imbalance a swap must win on held-out blocks to be worth moving two experts."""
WORTH_ALL_SWAPS: Final = 0.01
"""Gain over the old placement from which on the held-out curve, a noisy one, is not asked."""


@dataclass(frozen=True)
class Plan:
    """A placement of every layer.

    phy2log: int32 [L, S]; slot s lies on rank s // (S // num_gpus).
    log2phy: int32 [L, E, X]; slots of each expert in rising order, -1 padded, X = most replicas.
    logcnt:  int32 [L, E]; replicas of each expert.
    predicted_B: imbalance expected on unseen steps, judged on the last blocks of the window with
             plans made without them, on a sample of the layers.
    old_B:   the same of the old placement; None without one.
    moved:   share of slots whose expert comes from another rank (1 without an old placement).
    swaps:   swaps per layer the search was allowed.
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
    seconds: float = field(compare=False)


def maps_of(
    phy2log: npt.NDArray[np.int32], num_experts: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(log2phy int32 [L, E, X], logcnt int32 [L, E]) of a placement."""
    L, S = phy2log.shape
    logcnt = replica_counts(phy2log, num_experts)
    order = np.argsort(phy2log, axis=1, kind="stable")
    experts = np.take_along_axis(phy2log, order, axis=1)
    first = np.cumsum(logcnt, axis=1) - logcnt
    within = np.arange(S)[None, :] - np.take_along_axis(first, experts, axis=1)
    log2phy = np.full((L, num_experts, int(logcnt.max(initial=1))), -1, dtype=np.int32)
    log2phy[np.arange(L)[:, None], experts, within] = order
    return log2phy, logcnt


def initial_placement(layers: int, num_experts: int, num_slots: int) -> npt.NDArray[np.int32]:
    """Experts in order, then redundant slot i holds expert i mod E. int32 [L, S]."""
    return np.tile(np.arange(num_slots, dtype=np.int32) % num_experts, (layers, 1))


def slots_for(num_experts: int, redundant: int, num_gpus: int) -> int:
    """The smallest number of slots >= num_experts + redundant that all ranks share equally."""
    return -(-(num_experts + redundant) // num_gpus) * num_gpus


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
) -> Plan:
    """Plan placements for all layers; the same input gives the same bytes on every machine.

    window:     [W, L, E] assignments of each logical expert in W recorded steps (or [L, E]).
    num_slots:  physical experts a layer over all ranks, a multiple of num_gpus, >= E.
    old:        int [L, S], the placement in force: the plan starts from it and moves little.
    num_groups, num_nodes: when num_groups is a multiple of num_nodes > 1, whole expert groups
                stay inside a node (group-limited routing); otherwise global.
    objective:  "steps" balances typical steps, "totals" only sums over the window.
    scenarios:  blocks the window is averaged into; "auto" = 24, or 32 when loads move.
    max_swaps:  most swaps a layer (of two experts); steady loads stop earlier.
    time_limit_s: stop improving further layers after this long; gives up reproducibility.
    seed:       0 breaks ties by the lowest expert id; others by a seeded order of experts.

    Raises ShapeError, LoadError, TopologyError or PlanError for input that does not fit.
    """
    started = time.perf_counter()
    loads = as_loads(window)
    _, L, E = loads.shape
    check_topology(E, num_gpus, num_slots)
    if objective not in ("steps", "totals"):
        raise ShapeError(f"objective is 'steps' or 'totals', got {objective!r}")
    if max_swaps < 0 or (scenarios != "auto" and scenarios < 1):
        raise ShapeError(f"want max_swaps >= 0 and scenarios >= 1, got {max_swaps}, {scenarios}")
    before = None if old is None else as_placement(old, E, "old")
    if before is not None and before.shape != (L, num_slots):
        raise ShapeError(f"old wants shape {(L, num_slots)}, got {before.shape}")
    relabel = np.arange(E) if seed == 0 else np.random.default_rng(seed).permutation(E)
    start = None if before is None else np.argsort(relabel)[before]
    loads = loads[:, :, relabel]

    nodes = num_nodes if num_nodes > 1 and num_groups % num_nodes == 0 else 1
    if nodes > 1:
        _check_nodes(E, num_gpus, num_slots, num_groups, nodes)
    solver = _Solver(num_gpus, num_slots, num_groups if nodes > 1 else 1, nodes)
    count = 1 if objective == "totals" else None if scenarios == "auto" else int(scenarios)
    x, moving = make_scenarios(loads, num_gpus, count)
    swaps = max_swaps
    if start is not None and objective == "steps":
        share = MOVING_SHARE if moving else STEADY_SHARE
        swaps = min(max_swaps, max(FEW_SWAPS, int(share * num_slots / 2)))
    if objective == "totals" and start is None:
        swaps = max(swaps, 4 * num_slots)
    # moving loads always pay for all the swaps they are allowed; steady ones are asked
    ask = start is not None and objective == "steps" and not moving
    count = 1 if objective == "totals" else min(x.shape[1], 16)
    swaps, predicted, old_B = _choose_swaps(solver, loads, count, start, swaps, ask=ask)

    out = np.empty((L, num_slots), dtype=np.int64)
    for layer in range(L):
        late = time_limit_s is not None and time.perf_counter() - started > time_limit_s
        previous = None if start is None else start[layer]
        out[layer] = solver.layer(x[layer], previous, 0 if late else swaps)
    phy2log = relabel[out].astype(np.int32)
    if before is not None:
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
        swaps=swaps,
        seconds=time.perf_counter() - started,
    )


def _check_nodes(E: int, G: int, S: int, groups: int, nodes: int) -> None:
    if E % groups or G % nodes or S % nodes:
        raise TopologyError(
            f"node-limited plans want experts ({E}) divisible by num_groups ({groups}), and ranks "
            f"({G}) and slots ({S}) divisible by num_nodes ({nodes})"
        )


def _choose_swaps(
    solver: _Solver, loads: Float, count: int, old: Int | None, limit: int, *, ask: bool
) -> tuple[int, float, float | None]:
    """How many swaps pay, judged on the last blocks with plans made without them.

    Returns (swaps, imbalance expected of the plan, of the old placement or None).
    """
    W, L, _ = loads.shape
    sample = np.unique(np.linspace(0, L - 1, min(L, JUDGED_LAYERS)).astype(np.int64))
    part = loads[:, sample]
    held = blocks(part, 16)[-JUDGED_BLOCKS:] if W >= 16 else blocks(part, 1)
    train = part[: W * 12 // 16] if W >= 16 else part
    judge = scale(held, solver.num_gpus)
    x, _ = make_scenarios(train, solver.num_gpus, count)
    curves = np.empty((sample.size, limit + 1))
    for i, layer in enumerate(sample):
        solver.layer(x[i], None if old is None else old[layer], limit, judge[i], curves[i])
    curve = curves.mean(axis=0) / held.shape[0]
    swaps, old_B = limit, None
    if old is not None:
        shares = rank_shares(old[sample].astype(np.int32), loads.shape[2], solver.num_gpus)
        old_B = imbalance(rank_loads(judge.transpose(1, 0, 2), shares))[0]
        little = old_B - float(curve.min()) < WORTH_ALL_SWAPS
        if ask and little and W >= 16:
            swaps = int((curve + SWAP_PRICE * np.arange(limit + 1)).argmin())
    return swaps, float(curve[swaps]), old_B


def compiled() -> bool:
    """Whether numba is installed and planning uses the compiled kernels."""
    return _kernels() is not kernels_numpy


def _kernels() -> ModuleType:
    try:
        from deepinfer_eplb import kernels_numba
    except ImportError:
        return kernels_numpy
    return kernels_numba


class _Solver:
    """Plans one layer at a time; holds the topology."""

    def __init__(self, num_gpus: int, num_slots: int, groups: int, nodes: int) -> None:
        self.num_gpus, self.num_slots = num_gpus, num_slots
        self.groups, self.nodes = groups, nodes
        self.kernels: Any = _kernels()

    def layer(
        self,
        x: Float,
        old: Int | None,
        swaps: int,
        judge: Float | None = None,
        curve: Float | None = None,
    ) -> Int:
        """Placement int64 [S] of one layer. x: [K, E]; old: [S] or None.

        judge: [J, E] scenarios that are only watched; curve: [swaps + 1], filled with the sum over
        them of the busiest rank after each number of swaps.
        """
        E = x.shape[1]
        if judge is None or curve is None:
            judge, curve = np.empty((0, E)), np.empty(swaps + 1)
        if self.nodes == 1:
            return self._flat(x, old, swaps, self.num_gpus, judge, curve)
        return self._by_nodes(x, old, swaps, judge, curve)

    def _flat(
        self, x: Float, old: Int | None, swaps: int, G: int, judge: Float, curve: Float
    ) -> Int:
        K, E = x.shape
        S = self.num_slots * G // self.num_gpus
        C = S // G
        narrow = C <= NARROW_SLOTS
        w = np.full(K, 1.0 / K)
        n = np.ones(E, dtype=np.int64)
        self.kernels.replicate(x, w, n, S - E, NARROW_REPLICA_Q if narrow else PLACE_Q)
        r, judge_r = x / n, judge / n
        slots = np.full((G, C), -1, dtype=np.int64)
        if old is not None:
            slots[:] = old.reshape(G, C)
            self.kernels.drop_surplus(slots, n, r, w, SEARCH_Q)
        missing = n - np.bincount(slots[slots >= 0], minlength=E)
        todo = np.repeat(np.arange(E), missing)
        todo = todo[np.argsort(-(r.sum(axis=0) / K)[todo], kind="stable")]
        self.kernels.place(slots, todo, r, w, NARROW_PLACE_Q if narrow else PLACE_Q)
        done = self.kernels.improve(slots, r, w, SEARCH_Q, swaps, judge_r, curve)
        curve[done:] = curve[done]
        return slots.ravel()

    def _by_nodes(self, x: Float, old: Int | None, swaps: int, judge: Float, curve: Float) -> Int:
        """Whole groups to nodes first, then each node as a small global problem of its own."""
        E, G, N = x.shape[1], self.num_gpus // self.nodes, self.nodes
        home = self._groups_to_nodes(x, old)
        members = np.argsort(np.repeat(home, E // self.groups), kind="stable").reshape(N, -1)
        out = np.empty((N, self.num_slots // N), dtype=np.int64)
        curves = np.zeros((N, curve.size))
        for node in range(N):
            inside = members[node]
            mine = None
            if old is not None:
                place = np.full(E, -1)
                place[inside] = np.arange(inside.size)
                mine = place[old.reshape(N, -1)[node]]
                mine = None if (mine < 0).any() else mine
            part = np.ascontiguousarray(x[:, inside])
            watched = np.ascontiguousarray(judge[:, inside])
            own = -(-swaps // N)
            out[node] = inside[self._flat(part, mine, own, G, watched, curves[node, : own + 1])]
            curves[node, own + 1 :] = curves[node, own]
        curve[:] = curves.max(axis=0)
        return out.ravel()

    def _groups_to_nodes(self, x: Float, old: Int | None) -> Int:
        """int64 [groups]; node of each group, equal numbers, kept from a node-limited `old`."""
        N, size = self.nodes, x.shape[1] // self.groups
        if old is not None:
            seen = np.zeros((self.groups, N), dtype=np.bool_)
            seen[old // size, np.repeat(np.arange(N), old.size // N)] = True
            if (seen.sum(axis=1) == 1).all() and (seen.sum(axis=0) == self.groups // N).all():
                return seen.argmax(axis=1)
        load = np.ascontiguousarray(x.reshape(x.shape[0], self.groups, size).sum(axis=2))
        w = np.full(load.shape[0], 1.0 / load.shape[0])
        slots = np.full((N, self.groups // N), -1, dtype=np.int64)
        todo = np.argsort(-load.sum(axis=0), kind="stable")
        # node loads are sums over many ranks: scale to mean 1 so that powers stay in range
        load /= load.sum(axis=1, keepdims=True) / N
        self.kernels.place(slots, todo, load, w, PLACE_Q)
        nobody, curve = np.empty((0, self.groups)), np.empty(4 * self.groups + 1)
        self.kernels.improve(slots, load, w, SEARCH_Q, 4 * self.groups, nobody, curve)
        home = np.empty(self.groups, dtype=np.int64)
        home[slots.ravel()] = np.repeat(np.arange(N), slots.shape[1])
        return home


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
