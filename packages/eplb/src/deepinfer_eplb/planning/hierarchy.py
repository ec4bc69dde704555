"""Node-limited plans: whole expert groups to nodes first, then every node by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.errors import TopologyError
from deepinfer_eplb.planning import kernels_numpy
from deepinfer_eplb.planning.load_model import LoadModel
from deepinfer_eplb.planning.solver import PLACE_Q, REACH, SEARCH_Q, Solver

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

ENUMERATED: Final = 6000
"""Most ways to spread groups over nodes that are all tried; beyond it placed and searched."""


def check_nodes(E: int, G: int, S: int, groups: int, nodes: int) -> None:
    """Raise TopologyError where groups, ranks and slots do not divide evenly."""
    if E % groups or G % nodes or S % nodes:
        raise TopologyError(
            f"node-limited plans want experts ({E}) divisible by num_groups ({groups}), and ranks "
            f"({G}) and slots ({S}) divisible by num_nodes ({nodes})"
        )
    if S // nodes < E // nodes:
        raise TopologyError(f"{S // nodes} slots a node cannot hold {E // nodes} experts")


def layer_by_nodes(
    solver: Solver, model: LoadModel, layer: int, old: Int | None, budget: int, groups: int
) -> Int:
    """Placement int64 [S] of one layer that keeps every group inside one node."""
    c, noise = model.components[layer], model.noise[layer]
    E, N = noise.size, solver.nodes
    home = groups_to_nodes(solver, c, noise, old, groups)
    members = np.argsort(np.repeat(home, E // groups), kind="stable").reshape(N, -1)
    inner = replace(
        solver, num_gpus=solver.num_gpus // N, num_slots=solver.num_slots // N, nodes=1,
        swaps=0, moves=0,
    )  # fmt: skip
    out = np.empty((N, inner.num_slots), dtype=np.int64)
    for node in range(N):
        inside = members[node]
        mine = None
        if old is not None:
            place = np.full(E, -1)
            place[inside] = np.arange(inside.size)
            mine = place[old.reshape(N, -1)[node]]
            mine = None if (mine < 0).any() else mine
        part = replace(
            model,
            components=np.ascontiguousarray(c[None, :, inside]),
            noise=np.ascontiguousarray(noise[None, inside]),
        )
        out[node] = inside[inner.layer(part, 0, mine, -(-budget // N))]
    solver.swaps += inner.swaps
    solver.moves += inner.moves
    return out.ravel()


def groups_to_nodes(solver: Solver, c: Float, noise: Float, old: Int | None, groups: int) -> Int:
    """int64 [groups]; node of each group, equal numbers, kept from a node-limited `old`."""
    N, size = solver.nodes, noise.size // groups
    if old is not None:
        seen = np.zeros((groups, N), dtype=np.bool_)
        seen[old // size, np.repeat(np.arange(N), old.size // N)] = True
        if (seen.sum(axis=1) == 1).all() and (seen.sum(axis=0) == groups // N).all():
            return seen.argmax(axis=1)
    # node loads are sums over many ranks: scale to mean 1 so that powers stay in range
    per_node = solver.num_gpus // N
    load = np.ascontiguousarray(c.reshape(c.shape[0], groups, size).sum(axis=2)) / per_node
    doubt = noise.reshape(groups, size).sum(axis=1) / per_node**2
    variance = float(((load[1:] ** 2).sum(axis=0) + doubt).sum()) / N
    kappa = 0.5 * REACH / float(np.sqrt(variance)) if variance > 0 else 0.0
    each = groups // N
    ways = math.factorial(groups) // (math.factorial(each) ** N * math.factorial(N))
    if ways <= ENUMERATED:
        return _best_partition(load, doubt, kappa, N)
    slots = np.full((N, each), -1, dtype=np.int64)
    todo = np.argsort(-load[0], kind="stable")
    kernels_numpy.place(slots, todo, load, doubt, kappa, PLACE_Q)
    kernels_numpy.search(
        slots, load, doubt, np.ones(groups, dtype=np.int64), kappa, SEARCH_Q,
        np.ones((N, groups), dtype=np.bool_), 1.0, 8 * groups, 0.0, N, False,
    )  # fmt: skip
    home = np.empty(groups, dtype=np.int64)
    home[slots.ravel()] = np.repeat(np.arange(N), each)
    return home


def _best_partition(load: Float, doubt: Float, kappa: float, nodes: int) -> Int:
    """Least objective over all partitions of the groups into equal sets, one set a node.

    Depth first: the first unplaced group chooses its companions; a branch whose cost already
    reaches the best known is left.
    """
    import itertools

    groups = doubt.size
    each = groups // nodes

    def cost(chosen: tuple[int, ...]) -> float:
        picked = list(chosen)
        m = kernels_numpy.base(
            load[:, picked].sum(axis=1, keepdims=True), doubt[picked].sum(keepdims=True), kappa
        )
        return float(kernels_numpy.power(m, SEARCH_Q)[0])

    known = {s: cost(s) for s in itertools.combinations(range(groups), each)}
    best: tuple[float, list[tuple[int, ...]]] = (math.inf, [])

    def visit(rest: tuple[int, ...], spent: float, chosen: list[tuple[int, ...]]) -> None:
        nonlocal best
        if spent >= best[0]:
            return
        if not rest:
            best = (spent, chosen)
            return
        for others in itertools.combinations(rest[1:], each - 1):
            taken = (rest[0], *others)
            left = tuple(g for g in rest if g not in taken)
            visit(left, spent + known[taken], [*chosen, taken])

    visit(tuple(range(groups)), 0.0, [])
    home = np.empty(groups, dtype=np.int64)
    for node, taken in enumerate(best[1]):
        home[list(taken)] = node
    return home
