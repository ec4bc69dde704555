"""The compiled kernels give the plans of the numpy ones, to the byte; moves do what they say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from deepinfer_eplb import plan
from deepinfer_eplb.bench.loads import generate
from deepinfer_eplb.planning import kernels_numpy, solver

pytest.importorskip("numba")


@pytest.mark.parametrize(
    ("kind", "experts", "gpus", "slots", "more"),
    [
        ("skew", 48, 8, 56, {}),
        ("drift", 64, 16, 80, {}),
        ("zipf", 32, 16, 32, {}),
        ("burst", 24, 16, 48, {}),
        ("drift", 64, 40, 80, {}),
        ("drift", 64, 16, 80, {"num_nodes": 4}),
        ("skew", 64, 16, 96, {"num_nodes": 4, "num_groups": 8}),
        ("skew", 30, 10, 40, {"objective": "totals"}),
        ("burst", 48, 8, 56, {"seed": 5, "max_swaps": 9}),
    ],
)
def test_compiled_plans_equal_numpy_plans(monkeypatch, kind, experts, gpus, slots, more) -> None:
    trace = generate(kind, 2, steps=120, layers=3, experts=experts, tokens=3000)
    fast = plan(trace.counts[:60], gpus, slots, **more)
    fast_next = plan(trace.counts[60:], gpus, slots, fast.phy2log, **more)
    monkeypatch.setattr(solver, "kernels", lambda: kernels_numpy)
    assert solver.Solver(1, 1)._kernels is kernels_numpy
    slow = plan(trace.counts[:60], gpus, slots, **more)
    slow_next = plan(trace.counts[60:], gpus, slots, slow.phy2log, **more)
    assert fast.phy2log.tobytes() == slow.phy2log.tobytes()
    assert fast_next.phy2log.tobytes() == slow_next.phy2log.tobytes()
    assert fast_next.predicted_B == slow_next.predicted_B
    assert (fast_next.swaps, fast_next.replica_moves) == (slow_next.swaps, slow_next.replica_moves)


def problem(seed: int, E: int = 40, G: int = 8, C: int = 6):
    """(slots, components, noise, replica counts) of a random placement."""
    rng = np.random.default_rng(seed)
    c = np.concatenate([rng.gamma(2.0, size=(1, E)), rng.normal(0, 0.2, (4, E))])
    slots = np.concatenate([np.arange(E), np.arange(G * C - E)])
    slots = slots.reshape(C, G).T.copy()
    n = np.bincount(slots.ravel(), minlength=E)
    return slots, c, rng.gamma(1.0, 0.01, E), n


def objective(slots, c, noise, kappa: float = 0.5) -> float:
    n = np.bincount(slots.ravel(), minlength=c.shape[1])
    load = (c / n)[:, slots].sum(axis=2)
    base = load[0] + kappa * ((load[1:] ** 2).sum(axis=0) + (noise / n**2)[slots].sum(axis=1))
    return float((base**64).sum() ** (1 / 64))


def search(kernel, case, *, near=None, budget=2, price=0.0, replicas=True):
    slots, c, noise, n = case
    near = np.ones((slots.shape[0], c.shape[1]), dtype=bool) if near is None else near
    return kernel.search(slots, c, noise, n, 0.5, 6, near, 8.0, budget, price, 4, replicas)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_move_lowers_the_objective_and_keeps_the_placement_valid(compiled: bool) -> None:
    kernel = solver.kernels() if compiled else kernels_numpy
    case = problem(3)
    values, kinds = [objective(*case[:3])], [0, 0]
    while True:
        swaps, moves = search(kernel, case)
        if swaps + moves == 0:
            break
        kinds[0] += swaps
        kinds[1] += moves
        values.append(objective(*case[:3]))
        assert np.array_equal(np.bincount(case[0].ravel(), minlength=40), case[3])
        assert case[3].min() >= 1
    assert min(kinds) > 0
    assert len(values) > 5
    assert all(b < a for a, b in pairwise(values))


def test_a_slot_goes_from_an_expert_with_spare_replicas_to_one_that_needs_it() -> None:
    c = np.array([[8.0, 1.0, 1.0, 2.0, 2.0]])
    slots = np.array([[0, 3], [1, 2], [1, 4]])
    n = np.array([1, 2, 1, 1, 1])
    done = kernels_numpy.search(
        slots, c, np.zeros(5), n, 0.0, 6, np.ones((3, 5), dtype=bool), 1.0, 1, 0.0, 3, True
    )
    assert done == (0, 1)
    assert n.tolist() == [2, 1, 1, 1, 1]
    assert (slots == 0).any(axis=1).sum() == 2


def test_a_price_stops_moves_that_bring_less() -> None:
    free, dear = problem(6), problem(6)
    many = search(kernels_numpy, free, budget=100)
    few = search(kernels_numpy, dear, budget=100, price=1e-3)
    assert 0 < sum(few) < sum(many)
    assert objective(*free[:3]) < objective(*dear[:3])


def test_an_arrival_from_the_own_node_is_preferred() -> None:
    # rank 0 is heavy; experts 2 and 3 relieve it equally, 3 comes from its own node
    c = np.array([[3.0, 3.0, 1.0, 1.0, 1.0, 1.0]])
    start = np.array([[0, 1], [2, 4], [3, 5]])
    near = np.zeros((3, 6), dtype=bool)
    near[0], near[1, [2, 4]], near[2] = [1, 1, 0, 1, 0, 1], True, [1, 1, 0, 1, 0, 1]
    for near_now, partner in ((np.ones_like(near), 1), (near, 2)):
        slots, n = start.copy(), np.ones(6, dtype=np.int64)
        kernels_numpy.search(slots, c, np.zeros(6), n, 0.0, 6, near_now, 8.0, 2, 0.0, 3, False)
        assert (slots[partner] != start[partner]).any()
