"""Budgets, allocation, tables, corrections and histories."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_dspark import (
    BudgetScheduler,
    ConfidenceHistory,
    LosslessnessError,
    RuntimeCorrection,
    ShapeError,
    StepTable,
    TableError,
    survival,
)

STAIRS = StepTable((2, 4, 6, 8, 12, 16, 24, 32), (1.0, 1.1, 1.6, 1.7, 2.6, 2.7, 4.0, 5.5))


def slow_budget(conf, table, draft_ms, lengths) -> int:
    """Try every number of drafts, in the order of survival."""
    R = conf.shape[0]
    alive = sorted(
        (np.prod(conf[r, : k + 1]) for r in range(R) for k in range(lengths[r])), reverse=True
    )
    rates = [(R + sum(alive[:j])) / (table.cost(R + j) + draft_ms) for j in range(len(alive) + 1)]
    best = max(rates)
    return next(j for j, rate in enumerate(rates) if rate >= best * (1 - 1e-13))


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.floats(0, 3))
@settings(max_examples=150, deadline=None)
def test_budget_is_the_first_best_of_all_sizes(seed, R, gamma, draft_ms) -> None:
    rng = np.random.default_rng(seed)
    conf, lengths = rng.random((R, gamma)), rng.integers(0, gamma + 1, R)
    got = BudgetScheduler(STAIRS, gamma, draft_ms=draft_ms).budget(conf, lengths)
    assert got == slow_budget(conf, STAIRS, draft_ms, lengths)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 5), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_allocation_takes_the_largest_survivals_and_spends_the_budget(
    seed, R, gamma, budget
) -> None:
    rng = np.random.default_rng(seed)
    # few distinct values, many ones: ties are the difficult part
    conf = rng.choice([0.0, 0.5, 1.0, 1.0], (R, gamma))
    lengths = rng.integers(0, gamma + 1, R)
    lens = BudgetScheduler(STAIRS, gamma).allocate(budget, conf, lengths)
    assert (lens >= 0).all()
    assert (lens <= lengths).all()
    assert lens.sum() == min(budget, lengths.sum())
    alive = survival(conf)
    order = sorted(
        ((r, k) for r in range(R) for k in range(lengths[r])), key=lambda rk: (-alive[rk], rk)
    )
    expected = np.zeros(R, dtype=int)
    for r, k in order[:budget]:
        assert k == expected[r]  # never a later draft without the earlier one
        expected[r] += 1
    assert lens.tolist() == expected.tolist()


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(0, 16))
@settings(max_examples=150, deadline=None)
def test_later_confidences_never_change_whether_an_earlier_draft_is_verified(
    seed, R, gamma, budget
) -> None:
    rng = np.random.default_rng(seed)
    conf = rng.random((R, gamma))
    scheduler = BudgetScheduler(STAIRS, gamma)
    before = scheduler.allocate(budget, conf)
    r, k = int(rng.integers(R)), int(rng.integers(gamma))
    changed = conf.copy()
    changed[r, k + 1 :] = rng.random(gamma - k - 1)
    assert (before[r] > k) == (scheduler.allocate(budget, changed)[r] > k)


def test_threshold_stops_before_the_first_low_confidence() -> None:
    conf = np.array([[0.9, 0.2, 0.99], [0.1, 0.9, 0.9], [0.8, 0.8, 0.8]])
    scheduler = BudgetScheduler(STAIRS, 3, "threshold", threshold=0.5)
    assert scheduler.allocate(scheduler.budget(conf), conf).tolist() == [1, 0, 3]


def test_uniform_gives_all_requests_one_length() -> None:
    conf = np.array([[0.9, 0.8, 0.1], [0.9, 0.7, 0.2]])
    scheduler = BudgetScheduler(STAIRS, 3, "uniform", draft_ms=0.5)
    budget = scheduler.budget(conf)
    lens = scheduler.allocate(budget, conf)
    rates = [(2 + survival(conf)[:, :n].sum()) / (STAIRS.cost(2 + 2 * n) + 0.5) for n in range(4)]
    assert lens.tolist() == [int(np.argmax(rates))] * 2


def test_fixed_verifies_its_length_and_no_more_than_there_is() -> None:
    scheduler = BudgetScheduler(STAIRS, 3, "fixed", fixed_len=2)
    conf, lengths = np.ones((3, 3)), np.array([3, 1, 0])
    assert scheduler.budget(conf, lengths) == 3
    assert scheduler.allocate(3, conf, lengths).tolist() == [2, 1, 0]


def test_the_fixed_part_of_a_step_makes_verifying_more_worth_it() -> None:
    conf = np.full((4, 3), 0.6)
    without = BudgetScheduler(STAIRS, 3).budget(conf)
    assert BudgetScheduler(STAIRS, 3, draft_ms=5.0).budget(conf) > without


def test_a_small_promised_gain_falls_back_to_verifying_everything() -> None:
    conf = np.array([[0.9, 0.9], [0.9, 0.05]])
    eager = BudgetScheduler(STAIRS, 2, draft_ms=1.0)
    assert 0 < eager.budget(conf) < 4
    assert BudgetScheduler(STAIRS, 2, draft_ms=1.0, min_gain=0.5).budget(conf) == 4


def test_nan_confidence_counts_as_zero() -> None:
    assert survival(np.array([[0.5, np.nan, 1.0]])).tolist() == [[0.5, 0.0, 0.0]]


def test_exact_mode_demands_deterministic_drafts() -> None:
    scheduler = BudgetScheduler(STAIRS, 2, "exact")
    with pytest.raises(LosslessnessError):
        scheduler.budget(np.ones((1, 2)))
    assert scheduler.budget(np.ones((1, 2)), deterministic=True) >= 0


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: BudgetScheduler(STAIRS, 2, "best"), "mode is one of"),  # type: ignore[arg-type]
        (lambda: BudgetScheduler(STAIRS, 2, fixed_len=3), "fixed_len"),
        (lambda: BudgetScheduler(STAIRS, 2).budget(np.ones((1, 3))), r"\[R, 2\]"),
    ],
)
def test_misuse_is_named(build, says) -> None:
    with pytest.raises(ShapeError, match=says):
        build()


class Ring:
    """All-reduce among threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size), [np.zeros(0)] * size

    def rank(self, i: int):
        ring = self

        class Rank:
            def all_reduce_sum(self, values):
                ring.values[i] = values
                ring.barrier.wait(60)
                total = np.sum(ring.values, axis=0)
                ring.barrier.wait(60)
                return total

        return Rank()


def test_all_ranks_of_a_group_choose_the_size_that_is_best_for_all() -> None:
    rng = np.random.default_rng(0)
    sizes = (1, 3, 4)
    confs = [rng.random((n, 3)) for n in sizes]
    ring, budgets = Ring(3), [0, 0, 0]

    def run(i: int) -> None:
        budgets[i] = BudgetScheduler(STAIRS, 3, group=ring.rank(i)).budget(confs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)

    def tau(i: int, b: int) -> float:
        ranked = np.sort(survival(confs[i]).ravel())[::-1]
        return sizes[i] + float(ranked[: min(b - sizes[i], ranked.size)].sum())

    fits = [b for b in STAIRS.sizes if b >= max(sizes)]
    best = max(fits, key=lambda b: sum(tau(i, b) for i in range(3)) / STAIRS.cost(b))
    assert [b + n for b, n in zip(budgets, sizes, strict=True)] == [min(best, n * 4) for n in sizes]


def test_a_rank_without_requests_takes_part_in_the_group() -> None:
    ring, budgets = Ring(2), [None, None]
    confs = [np.zeros((0, 2)), np.full((2, 2), 0.9)]

    def run(i: int) -> None:
        budgets[i] = BudgetScheduler(STAIRS, 2, group=ring.rank(i)).budget(confs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert budgets[0] == 0
    assert budgets[1] is not None
    assert budgets[1] > 0


def test_a_table_is_a_staircase_made_monotone() -> None:
    table = StepTable((4, 8, 16), (2.0, 1.5, 3.0))
    assert [table.cost(b) for b in (0, 1, 4, 5, 8, 9, 16)] == [2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert table.size_for(5) == 8
    assert table.cost(28) == pytest.approx(3.0 + 12 * (3.0 - 2.0) / 12)
    assert StepTable((4, 8), (1.0, 2.0), "error").cost(9) == np.inf


def test_measuring_drops_the_extremes_and_goes_from_large_to_small() -> None:
    durations = {8: [9, 1, 5, 5, 6, 5], 4: [9, 3, 3, 1, 8, 3]}  # first is the warm-up
    now, order = [0.0], []

    def step(size: int) -> None:
        order.append(size)
        now[0] += durations[size][order.count(size) - 1] / 1e3

    table = StepTable.measure(step, [4, 8], clock=lambda: now[0])
    assert order[0] == 8
    assert table.sizes == (4, 8)
    assert table.ms == pytest.approx((3.0, 5.0))


def test_tables_are_kept_by_key_and_expire(tmp_path) -> None:
    key = {"model": "m", "sizes": [1, 2], "dtype": "bf16"}
    table = StepTable((1, 2), (1.0, 2.0))
    path = table.save(tmp_path, key, now=1000.0)
    assert StepTable.load(tmp_path, key, now=1500.0) == table
    assert StepTable.load(tmp_path, key, now=9000.0) is None
    assert StepTable.load(tmp_path, key | {"dtype": "fp8"}, now=1500.0) is None
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"format": 1, "created": 0, "table": [[2, 1], [1, 1]]}']
)
def test_a_damaged_table_is_named(tmp_path, damage) -> None:
    path = StepTable((1,), (1.0,)).save(tmp_path, {}, now=0.0)
    path.write_text(damage)
    with pytest.raises(TableError, match=r"remove it|increasing"):
        StepTable.load(tmp_path, {}, now=1.0)


def test_a_table_cut_at_any_byte_is_never_taken_for_a_table(tmp_path) -> None:
    path = StepTable((1, 2), (1.0, 2.0)).save(tmp_path, {}, now=0.0)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(TableError):
            StepTable.load(tmp_path, {}, now=1.0)
    assert json.loads(whole)["format"] == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda: StepTable((), ()),
        lambda: StepTable((2, 1), (1.0, 1.0)),
        lambda: StepTable((1,), (0.0,)),
        lambda: StepTable((1,), (1.0,), "clip"),
        lambda: StepTable.measure(lambda s: None, [1], repeats=2),
    ],
)
def test_impossible_tables_are_refused(build) -> None:
    with pytest.raises(TableError):
        build()


def test_correction_learns_the_sampler_and_the_context_slope() -> None:
    table = StepTable((8, 16), (1.0, 2.0))
    made = RuntimeCorrection(table)
    assert made.fixed_ms(4) == 0.0
    for i in range(80):
        size = (8, 16)[i % 2]
        made.update(4, size, table.cost(size) + 0.05 * size, 0.7 if i % 9 else 50.0)
    assert made.fixed_ms(4) == pytest.approx(0.7)
    assert made.fixed_ms(99) == pytest.approx(0.7)  # no samples of its own: over all
    assert made.slope_ms == pytest.approx(0.05)


def test_correction_never_makes_a_step_cheaper() -> None:
    made = RuntimeCorrection(StepTable((8,), (5.0,)))
    for _ in range(80):
        made.update(1, 8, 1.0, 0.0)
    assert made.slope_ms == 0.0


def test_budget_pairs_with_the_round_before_the_one_in_hand() -> None:
    memory = ConfidenceHistory(4, 2)
    slots = np.array([2, 0])
    assert memory.older(slots, 0, np.array([True, False])).tolist() == [[1, 1], [0, 0]]
    memory.record(slots, np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert memory.older(slots, 0).tolist() == [[1, 1], [1, 1]]
    assert memory.older(slots, 1)[0].tolist() == [0.1, 0.2]
    memory.record(slots, np.array([[0.5, 0.6], [0.7, 0.8]]))
    assert memory.older(slots, 0)[0].tolist() == [0.1, 0.2]
    assert memory.older(slots, np.array([1, 0])).tolist() == [[0.5, 0.6], [0.3, 0.4]]
    assert memory.newest(slots)[1].tolist() == [0.7, 0.8]
    memory.stop(np.array([2]))
    assert memory.older(slots, 1)[0].tolist() == [0, 0]
    memory.reset(slots)
    assert memory.older(slots, 1).tolist() == [[1, 1], [1, 1]]


def test_overhead_of_scheduling_256_requests_is_numpy_not_python() -> None:
    """No loop over requests: the number of Python calls does not grow with R."""
    import sys

    def calls(R: int) -> int:
        conf = np.random.default_rng(0).random((R, 5))
        scheduler = BudgetScheduler(StepTable.linear(12.5, 0.034), 5)
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(trace)
        try:
            scheduler.allocate(scheduler.budget(conf), conf)
        finally:
            sys.setprofile(None)
        return count

    assert calls(256) == calls(8)


def test_all_pairs_of_modes_and_empty_batches_work() -> None:
    for mode, deterministic in itertools.product(
        ("causal", "exact", "uniform", "threshold", "fixed"), (True,)
    ):
        scheduler = BudgetScheduler(STAIRS, 2, mode)
        conf = np.zeros((0, 2))
        budget = scheduler.budget(conf, deterministic=deterministic)
        assert scheduler.allocate(budget, conf).size == 0
