"""The compiled kernels give the plans of the numpy ones, to the byte."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from deepinfer_eplb import kernels_numpy, plan, solver
from deepinfer_eplb.loads import generate

pytest.importorskip("numba")


@pytest.mark.parametrize(
    ("kind", "experts", "gpus", "slots"),
    [("skew", 48, 8, 56), ("drift", 64, 16, 80), ("zipf", 32, 16, 32), ("static", 24, 16, 48)],
)
def test_compiled_plans_equal_numpy_plans(monkeypatch, kind, experts, gpus, slots) -> None:
    trace = generate(kind, 2, steps=120, layers=3, experts=experts, tokens=3000)
    fast = plan(trace.counts[:60], gpus, slots)
    fast_next = plan(trace.counts[60:], gpus, slots, fast.phy2log)
    monkeypatch.setattr(solver, "kernels", lambda: kernels_numpy)
    assert not solver.compiled()
    slow = plan(trace.counts[:60], gpus, slots)
    slow_next = plan(trace.counts[60:], gpus, slots, slow.phy2log)
    assert fast.phy2log.tobytes() == slow.phy2log.tobytes()
    assert fast_next.phy2log.tobytes() == slow_next.phy2log.tobytes()
    assert fast_next.predicted_B == slow_next.predicted_B


def test_a_swap_never_raises_the_objective() -> None:
    rng = np.random.default_rng(3)
    K, E, G, C = 5, 40, 8, 5
    x = rng.gamma(2.0, size=(K, E))
    slots = rng.permutation(E).reshape(G, C).astype(np.int64)
    w = np.full(K, 0.2)

    def objective() -> float:
        load = kernels_numpy.rank_loads(slots, x)
        return float((((load / load.mean()) ** 32).sum(axis=1) ** (1 / 32)).sum())

    history = np.empty(2)
    values = [objective()]
    while kernels_numpy.improve(slots, x, w, 5, 1, x, history):
        values.append(objective())
    assert len(values) > 5
    assert all(b < a for a, b in pairwise(values))
    assert sorted(slots.ravel().tolist()) == list(range(E))
