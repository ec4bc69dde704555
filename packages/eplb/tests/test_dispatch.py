"""Tokens reach a replica of their expert; the waterfill is as good as the linear program."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_eplb import ShapeError, dispatch, evaluate, maps_of, plan, waterfill
from deepinfer_eplb.bench.loads import generate

optimize = pytest.importorskip("scipy.optimize")


def routed(seed: int = 0, tokens: int = 4000):
    trace = generate("skew", seed, steps=60, layers=1, experts=32, tokens=2000)
    made = plan(trace.counts, 8, 48)
    rng = np.random.default_rng(seed)
    p = trace.expected.mean(axis=0)[0]
    ids = np.stack([rng.choice(32, size=2, replace=False, p=p / p.sum()) for _ in range(tokens)])
    return ids, made


@pytest.mark.parametrize("mode", ["hash", "even", "local", "waterfill"])
def test_every_token_reaches_a_replica_of_its_expert(mode) -> None:
    ids, made = routed()
    counts = np.bincount(ids.ravel(), minlength=32)
    shares = waterfill(counts, made.phy2log[0], 8)
    slots = dispatch(
        ids, made.log2phy[0], made.logcnt[0], mode=mode, slots_per_rank=6, source_rank=3,
        shares=shares,
    )  # fmt: skip
    assert np.array_equal(made.phy2log[0][slots], ids)


def test_even_mode_gives_replicas_equal_numbers() -> None:
    ids, made = routed()
    slots = dispatch(ids, made.log2phy[0], made.logcnt[0], mode="even", layer=3, step=9)
    taken = np.bincount(slots.ravel(), minlength=48)
    for e in range(32):
        own = taken[made.phy2log[0] == e]
        assert own.max() - own.min() <= 1


def test_hash_mode_is_even_on_average_and_differs_between_layers() -> None:
    table, count = np.arange(4)[None], np.array([4])
    ids = np.zeros((8000, 1), dtype=int)
    a = dispatch(ids, table, count, layer=0)[:, 0]
    b = dispatch(ids, table, count, layer=1)[:, 0]
    assert np.abs(np.bincount(a, minlength=4) - 2000).max() < 250
    assert 0.2 < (a == b).mean() < 0.3
    # not a function of token % 4: each residue class is spread too
    for residue in range(4):
        assert np.bincount(a[residue::4], minlength=4).min() > 350


def test_local_mode_prefers_its_rank_then_its_node() -> None:
    table, count = np.array([[0, 5], [2, 7]]), np.array([2, 2])
    out = dispatch(
        np.array([[0, 1]]), table, count, mode="local", slots_per_rank=1, source_rank=5,
        ranks_per_node=4,
    )  # fmt: skip
    assert out.tolist() == [[5, 7]]


def test_waterfill_mode_follows_its_shares() -> None:
    table, count = np.array([[0, 1]]), np.array([2])
    ids = np.zeros((100, 1), dtype=int)
    out = dispatch(ids, table, count, mode="waterfill", shares=np.array([30.0, 70.0]))
    assert np.bincount(out.ravel()).tolist() == [30, 70]


def linear_program(v: np.ndarray, phy2log: np.ndarray, ranks: int) -> float:
    """Least possible busiest rank: HiGHS on y_s >= 0, sum over replicas = v_e, rank sums <= m."""
    S, E = phy2log.size, v.size
    upper = np.zeros((ranks, S + 1))
    upper[np.arange(S) // (S // ranks), np.arange(S)] = 1.0
    upper[:, -1] = -1.0
    equal = np.zeros((E, S + 1))
    equal[phy2log, np.arange(S)] = 1.0
    cost = np.append(np.zeros(S), 1.0)
    solved = optimize.linprog(
        cost, A_ub=upper, b_ub=np.zeros(ranks), A_eq=equal, b_eq=v, method="highs"
    )
    assert solved.status == 0
    return float(solved.fun)


@pytest.mark.parametrize("seed", range(9))
def test_eight_sweeps_of_waterfill_are_within_one_percent_of_the_linear_program(seed: int) -> None:
    trace = generate(["skew", "drift", "zipf"][seed % 3], seed, steps=80, layers=1)
    made = plan(trace.counts[:60], 64, 448)
    for step in (61, 79):
        v = trace.counts[step, 0].astype(float)
        split = waterfill(v, made.phy2log[0], 64)
        for e in range(384):
            assert split[made.phy2log[0] == e].sum() == pytest.approx(v[e])
        assert split.min() >= 0
        best = linear_program(v, made.phy2log[0], 64)
        assert best - 1e-6 <= split.reshape(64, 7).sum(axis=1).max() <= best * 1.01


def test_per_step_dispatch_goes_below_the_floor_of_static_placement() -> None:
    trace = generate("skew", 2, steps=110, layers=3)
    made = plan(trace.counts[:100], 64, 448)
    even = evaluate(trace.counts[100:], made.phy2log, 64)
    level = evaluate(trace.counts[100:], made.phy2log, 64, dispatch="waterfill")
    assert even.floor - 0.015 > level.B
    assert level.B < even.B - 0.015


def test_two_slots_on_one_rank_get_the_load_once() -> None:
    split = waterfill(np.array([10.0, 2.0]), np.array([0, 0, 0, 1]), 2)
    assert split.reshape(2, 2).sum(axis=1).tolist() == [6.0, 6.0]


def test_maps_list_replicas_in_slot_order() -> None:
    log2phy, logcnt = maps_of(np.array([[1, 0, 1, 2]], dtype=np.int32), 3)
    assert log2phy.tolist() == [[[1, -1], [0, 2], [3, -1]]]
    assert logcnt.tolist() == [[1, 2, 1]]


def test_misuse_raises() -> None:
    table, count = np.array([[0]]), np.array([1])
    with pytest.raises(ShapeError, match=r"0\.\.0"):
        dispatch(np.array([[1]]), table, count)
    with pytest.raises(ShapeError, match="wants shares"):
        dispatch(np.array([[0]]), table, count, mode="waterfill")
    with pytest.raises(ShapeError, match="mode is"):
        dispatch(np.array([[0]]), table, count, mode="nearest")
