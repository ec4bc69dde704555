"""The gate and the learned step table, on numbers instead of clocks."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_dspark import BudgetScheduler, ShapeError, SpeculationGate, StepTimes, TableError


def serve(gate: SpeculationGate, rounds: int, gain, ms, requests: int = 8) -> tuple[float, int]:
    """Milliseconds a token and the rounds that drafted; gain(i), ms(i) of a drafting round."""
    spent, tokens, drafted = 0.0, 0, 0
    for i in range(rounds):
        draft = gate.open(requests)
        cost, got = (ms(i), gain(i)) if draft else (10.0, requests)
        gate.record(requests, drafts=5 * requests if draft else 0, tokens=got, ms=cost)
        spent, tokens, drafted = spent + cost, tokens + got, drafted + draft
    return spent / tokens, drafted


def test_useless_drafts_cost_less_than_three_percent() -> None:
    """Drafting rounds of twice the time that gain nothing, over 2,000 rounds."""
    per_token, drafted = serve(SpeculationGate(), 2000, lambda i: 8, lambda i: 20.0)
    assert per_token < 1.03 * 10.0 / 8
    assert drafted > 4


def test_drafts_that_pay_run_nearly_always() -> None:
    per_token, drafted = serve(SpeculationGate(), 2000, lambda i: 24, lambda i: 15.0)
    assert drafted > 1900
    assert per_token < 1.02 * 15.0 / 24


def test_drafts_that_begin_to_pay_are_found_again() -> None:
    gate = SpeculationGate()
    serve(gate, 600, lambda i: 8, lambda i: 20.0)
    _, drafted = serve(gate, 2000, lambda i: 30, lambda i: 15.0)
    assert drafted > 1000


def test_one_stalled_round_shuts_nobody_out() -> None:
    _, drafted = serve(
        SpeculationGate(), 500, lambda i: 24, lambda i: 9000.0 if i % 50 == 7 else 15.0
    )
    assert drafted > 450


def test_batch_sizes_are_judged_apart() -> None:
    gate = SpeculationGate()
    for _ in range(300):
        serve(gate, 1, lambda i: 3, lambda i: 11.0, requests=1)
        serve(gate, 1, lambda i: 70, lambda i: 40.0, requests=64)
    assert serve(gate, 100, lambda i: 3, lambda i: 11.0, requests=1)[1] > 90
    assert serve(gate, 100, lambda i: 70, lambda i: 40.0, requests=64)[1] < 30


@pytest.mark.parametrize(
    "options",
    [{"margin": -1.0}, {"margin": float("nan")}, {"first": 0}, {"first": 9, "last": 8},
     {"plain_every": 1}],
)  # fmt: skip
def test_impossible_gates_are_refused(options) -> None:
    with pytest.raises(ShapeError):
        SpeculationGate(**options)


def test_a_learned_table_passes_through_what_was_seen_and_never_falls() -> None:
    times = StepTimes(12)
    with pytest.raises(TableError, match="no step"):
        times.table()
    for size, ms in ((1, 10.0), (1, 11.0), (1, 90.0), (5, 14.0), (9, 18.0)):
        times.record(size, ms)
    table = times.table()
    assert table.cost(1) == 11.0
    assert table.cost(5) == 14.0
    assert table.cost(7) == pytest.approx(16.0)
    assert table.cost(12) > 18.0
    assert (np.diff(table.ms) >= 0).all()


def test_one_slow_step_does_not_make_every_larger_size_look_slow() -> None:
    times = StepTimes(9)
    for size, ms in ((1, 10.0), (2, 500.0), (3, 12.0), (3, 12.0), (3, 12.0), (8, 16.0), (8, 16.0)):
        times.record(size, ms)
    for _ in range(3):
        times.record(2, 11.0)
    assert times.table().cost(8) == 16.0


def test_broken_times_are_dropped() -> None:
    times = StepTimes(4)
    for size, ms in ((0, 1.0), (9, 1.0), (1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))):
        times.record(size, ms)
    assert not times.known


def test_a_scheduler_follows_the_table_it_is_given() -> None:
    times = StepTimes(6)
    times.record(1, 10.0)
    times.record(6, 60.0)
    scheduler = BudgetScheduler(times.table(), 5, "exact")
    conf = np.full((1, 5), 0.6)
    assert scheduler.budget(conf, deterministic=True) == 0
    for _ in range(9):
        times.record(6, 10.5)
    scheduler.retime(times.table())
    assert scheduler.budget(conf, deterministic=True) == 5


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    times = StepTimes(8, forget=50)
    times.record(1, 10.0)
    times.record(4, 900.0)
    for _ in range(49):
        times.record(1, 10.0)
    assert times.table().cost(4) == 900.0
    times.record(1, 10.0)
    assert times.table().cost(4) < 11.0
    assert times.table().cost(1) == 10.0
