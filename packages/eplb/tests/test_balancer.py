"""Recording, checking, planning and committing on several ranks at once."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import threads

from deepinfer_eplb import (
    Balancer,
    CommitError,
    Gate,
    LoadError,
    LoadWindow,
    ShapeError,
    initial_placement,
    movement,
    plan,
    rearrange_layer,
)
from deepinfer_eplb.bench.loads import generate
from deepinfer_eplb.rearrange.movement import RankMoves

L, E, G, S = 2, 16, 4, 24
ALWAYS = Gate(t_moe_s=1.0, expert_bytes=1.0, bytes_per_s=1e12)


def slot_counts(loads: np.ndarray, phy2log: np.ndarray) -> np.ndarray:
    """[L, S] counts when each expert's load is split evenly, the rest to its first replicas."""
    out = np.zeros(phy2log.shape, dtype=np.int64)
    for layer in range(phy2log.shape[0]):
        for e in range(loads.shape[1]):
            at = np.flatnonzero(phy2log[layer] == e)
            share, rest = divmod(int(loads[layer, e]), at.size)
            out[layer, at] = share
            out[layer, at[:rest]] += 1
    return out


def at_once(run) -> None:
    """Plan within the step, so that tests know at which step a plan is there."""
    run()


def make(transport, **changes) -> tuple[Balancer, list[list[np.ndarray]]]:
    start = initial_placement(L, E, S)
    C = S // G
    mine = start[:, transport.rank * C : (transport.rank + 1) * C]
    weights = [
        [mine[layer][:, None] * np.ones((1, 3)), (mine[layer] * 10.0)[:, None].astype(np.float32)]
        for layer in range(L)
    ]
    arguments = {
        "transport": transport, "weights": weights, "initial": start, "gate": ALWAYS,
        "window": LoadWindow(L, E, blocks=16, steps_per_block=1),
        "check_every": 4, "rearrange_every": 16, "record_every": 1, "plan_steps": 1,
        "background": at_once,
    } | changes  # fmt: skip
    return Balancer(L, E, G, S, **arguments), weights


TRACE = generate("skew", 1, steps=80, layers=L, experts=E, tokens=1000).counts


def serve(transport, steps: int = 60, idle: int | None = None, **changes):
    balancer, weights = make(transport, **changes)
    C, events = S // G, []
    mine = slice(transport.rank * C, (transport.rank + 1) * C)
    for step in range(steps):
        counts = slot_counts(TRACE[step], balancer.phy2log)[:, mine]
        events.append(balancer.step(None if transport.rank == idle else counts))
    balancer.close()
    return balancer, weights, events


def test_weights_follow_the_maps_on_every_rank() -> None:
    results = threads.run_ranks(G, serve)
    first = results[0][0]
    assert any(e.accepted for e in results[0][2])
    assert not np.array_equal(first.phy2log, initial_placement(L, E, S))
    for rank, (balancer, weights, _) in enumerate(results):
        assert np.array_equal(balancer.phy2log, first.phy2log)
        C = S // G
        held = balancer.phy2log[:, rank * C : (rank + 1) * C]
        for layer in range(L):
            assert np.array_equal(weights[layer][0][:, 0], held[layer])
            assert np.array_equal(weights[layer][1][:, 0], held[layer] * 10.0)


def test_rearranging_lowers_the_imbalance_of_later_checks() -> None:
    _, _, events = threads.run_ranks(G, serve)[0]
    checks = [e.checked.B for e in events if e.checked is not None]
    assert checks[-1] < checks[0] - 0.1


def test_an_idle_rank_keeps_the_group_going_and_adds_no_load() -> None:
    results = threads.run_ranks(G, lambda t: serve(t, idle=2))
    assert all(np.array_equal(r[0].phy2log, results[0][0].phy2log) for r in results)
    assert any(e.committed for e in results[0][2])


def test_layers_commit_one_at_a_time_and_maps_are_updated_in_place() -> None:
    def body(transport):
        balancer, _ = make(transport)
        addresses = [a.ctypes.data for a in (balancer.phy2log, balancer.log2phy, balancer.logcnt)]
        C, seen = S // G, []
        for step in range(40):
            part = slot_counts(TRACE[step], balancer.phy2log)
            event = balancer.step(part[:, transport.rank * C : (transport.rank + 1) * C])
            seen.append(event.committed)
        balancer.close()
        same = addresses == [
            a.ctypes.data for a in (balancer.phy2log, balancer.log2phy, balancer.logcnt)
        ]
        return seen, same

    for seen, same in threads.run_ranks(G, body):
        assert same
        assert max(len(c) for c in seen) == 1
        assert sum(len(c) for c in seen) >= L


def test_counts_taken_under_an_old_map_stay_with_their_experts() -> None:
    """A map change in mid-window must not move recorded loads to other experts."""
    window = LoadWindow(1, 4, blocks=8, steps_per_block=1)
    a, b = np.array([[0, 1, 2, 3]]), np.array([[3, 2, 1, 0]])
    window.add(np.array([[8, 4, 2, 1]]), a)
    window.add(np.array([[1, 2, 4, 8]]), b)
    assert window.snapshot().sum(axis=0).tolist() == [[16, 8, 4, 2]]


def test_the_window_forgets_its_oldest_block_and_leaves_out_the_open_one() -> None:
    window = LoadWindow(1, 1, blocks=3, steps_per_block=2)
    for value in range(9):
        window.add(np.array([[value]]), np.array([[0]]))
    assert window.snapshot()[:, 0, 0].tolist() == [4 + 5, 6 + 7]
    assert window.recorded == 5
    window.clear()
    assert window.recorded == 0
    assert window.snapshot().shape == (0, 1, 1)


def test_window_sums_do_not_overflow_int32() -> None:
    window = LoadWindow(1, 1, blocks=1, steps_per_block=8)
    for _ in range(8):
        window.add(np.array([[2**31 - 1]], dtype=np.int32), np.array([[0]]))
    assert window.snapshot()[0, 0, 0] == 8 * (2**31 - 1)


def test_the_window_refuses_overflowed_counters_and_wrong_shapes() -> None:
    window = LoadWindow(1, 4)
    with pytest.raises(LoadError, match="overflowed"):
        window.add(np.array([[-1]]), np.array([[0]]))
    with pytest.raises(ShapeError, match="L = 1"):
        window.add(np.ones((2, 3)), np.zeros((2, 3), dtype=int))


def test_the_gate_keeps_a_plan_that_is_good_enough() -> None:
    window = generate("static", 3, steps=64, layers=3, experts=32, tokens=4000).counts
    old = plan(window, 8, 40).phy2log
    made = plan(window, 8, 40, old)
    assert not Gate().worth(made, 10_000)
    assert Gate().worth(replace(made, old_B=made.predicted_B + 0.2), 10_000)
    assert not Gate().worth(replace(made, old_B=made.predicted_B + 0.2, moved=0.5), 1)
    assert Gate().worth(replace(made, old_B=None), 1)


def test_a_rejected_plan_changes_nothing() -> None:
    never = Gate(t_moe_s=0.0)
    balancer, weights, events = threads.run_ranks(G, lambda t: serve(t, gate=never))[1]
    assert any(e.accepted is False for e in events)
    assert np.array_equal(balancer.phy2log, initial_placement(L, E, S))
    assert np.array_equal(weights[0][0][:, 0], initial_placement(L, E, S)[0, 6:12])


def test_the_first_rearrangement_comes_after_a_quarter_of_the_interval() -> None:
    _, _, events = threads.run_ranks(G, serve)[0]
    decided = [i + 1 for i, e in enumerate(events) if e.decided is not None]
    assert decided[0] == 4 + 1  # check at step 4, one step of planning
    assert decided[1] - decided[0] == 16


def test_a_group_of_one_permutes_its_own_weights() -> None:
    weights = [[np.arange(8.0)[:, None] % 6]]
    balancer = Balancer(
        1, 6, 4, 8, weights=weights, gate=ALWAYS, check_every=2, rearrange_every=2, record_every=1,
        plan_steps=0, background=at_once,
        window=LoadWindow(1, 6, blocks=4, steps_per_block=1),
    )  # fmt: skip
    loads = np.array([[90, 5, 5, 5, 60, 5]])
    for _ in range(20):
        balancer.step(slot_counts(loads, balancer.phy2log))
    balancer.close()
    assert balancer.logcnt[0, 0] > 1
    assert np.array_equal(weights[0][0][:, 0], balancer.phy2log[0])


def test_a_wrong_expert_on_the_wire_leaves_all_weights_untouched() -> None:
    old, new = np.array([0, 1]), np.array([1, 0])
    moves = movement(old, new, 2)
    # rank 0 is told the truth about its slots, but a peer holding something else sends
    lied = replace(moves, old=np.array([0, 7]))

    def body(transport):
        weights = [np.full((1, 2), float(transport.rank))]
        with pytest.raises(CommitError, match="no weight was changed"):
            rearrange_layer(lied, weights, [np.empty((1, 2))], transport)
        return weights[0].copy()

    kept = threads.run_ranks(2, body)
    assert [w[0, 0] for w in kept] == [0.0, 1.0]


def test_a_missing_receive_is_noticed_by_the_harness() -> None:
    """The hang detector itself: drop one receive and the group must not end silently."""
    moves = movement(np.array([0, 1]), np.array([1, 0]), 2)
    nothing = RankMoves((), tuple(() for _ in moves.ranks[0].buckets), (), ())
    broken = replace(moves, ranks=(nothing, moves.ranks[1]))
    old_timeout, threads.TIMEOUT = threads.TIMEOUT, 0.5

    def body(transport):
        which = broken if transport.rank == 0 else moves
        return rearrange_layer(which, [np.ones((1, 2))], [np.empty((1, 2))], transport)

    try:
        with pytest.raises(Exception):  # noqa: B017, PT011 queue.Empty or a broken barrier
            threads.run_ranks(2, body)
    finally:
        threads.TIMEOUT = old_timeout


def test_only_rank_0_plans_and_all_take_over_its_plan() -> None:
    planned: list[int] = []

    def counted(*arguments, **named):
        planned.append(1)
        return plan(*arguments, **named)

    results = threads.run_ranks(G, lambda t: serve(t, planner=counted))
    decided = [[e.decided for e in events if e.decided is not None] for _, _, events in results]
    assert len(planned) == len(decided[0]) > 1
    for other in decided[1:]:
        for a, b in zip(decided[0], other, strict=True):
            assert np.array_equal(a.phy2log, b.phy2log)
            assert np.array_equal(a.log2phy, b.log2phy)
            assert (a.predicted_B, a.old_B, a.moved, a.swaps, a.replica_moves) == (
                b.predicted_B,
                b.old_B,
                b.moved,
                b.swaps,
                b.replica_moves,
            )


def test_the_planner_is_told_where_nodes_end() -> None:
    seen = []

    def spy(*arguments, **named):
        seen.append(named["num_nodes"])
        return plan(*arguments, **named)

    threads.run_ranks(G, lambda t: serve(t, steps=8, ranks_per_node=2, planner=spy))
    assert seen == [2]


@pytest.mark.parametrize(
    "broken",
    [MemoryError("no room for the window"), SystemExit(3), LoadError("odd"), KeyboardInterrupt()],
    ids=lambda e: type(e).__name__,
)
def test_a_planner_that_fails_leaves_the_placement_and_one_log_line(broken, caplog) -> None:
    def fails(*_, **__):
        raise broken

    results = threads.run_ranks(G, lambda t: serve(t, steps=20, planner=fails))
    for rank, (balancer, _, events) in enumerate(results):
        kept = {step: e.kept for step, e in enumerate(events) if e.kept}
        assert list(kept) == [4]
        assert (type(broken).__name__ in kept[4]) == (rank == 0)
        assert balancer.failure is None
        assert np.array_equal(balancer.phy2log, initial_placement(L, E, S))
    assert len(caplog.records) == 1
    assert "the placement in force stays" in caplog.text


@pytest.mark.parametrize("answer", ["nonsense", "missing expert", "another size"])
def test_a_planner_or_gate_that_answers_nonsense_is_a_failed_plan(answer) -> None:
    def odd(*arguments, **named):
        made = plan(*arguments, **named)
        if answer == "nonsense":
            return None
        if answer == "missing expert":
            return replace(made, phy2log=np.zeros_like(made.phy2log))
        return replace(made, phy2log=made.phy2log[:, :-4])

    results = threads.run_ranks(G, lambda t: serve(t, steps=8, planner=odd))
    assert all(sum(e.kept is not None for e in events) == 1 for _, _, events in results)


def test_a_plan_that_is_late_is_asked_for_again_and_nobody_waits() -> None:
    late: list = []

    def run(transport):
        balancer, _ = make(transport, background=late.append)
        mine = slice(transport.rank * 6, transport.rank * 6 + 6)
        seen = []
        for step in range(20):
            if step == 12 and transport.rank == 0:
                late.pop()()  # the planner ends at last
            event = balancer.step(slot_counts(TRACE[step], balancer.phy2log)[:, mine])
            seen.append((event.decided is not None, bool(event.committed)))
        return seen

    for seen in threads.run_ranks(G, run):
        assert [s for s, (decided, _) in enumerate(seen) if decided] == [12]
        assert sum(committed for _, committed in seen) == L


def test_a_planner_that_never_ends_is_given_up_and_asked_anew() -> None:
    started: list = []
    results = threads.run_ranks(G, lambda t: serve(t, steps=40, background=started.append))
    for balancer, _, events in results:
        kept = [step for step, e in enumerate(events) if e.kept]
        assert kept == [19]  # due at step 4, given up 16 later, when the next is due
        assert balancer.failure is None
    assert len(started) > 1


def test_without_a_thread_to_be_had_serving_goes_on() -> None:
    def none_left(run) -> None:
        raise RuntimeError("can't start new thread")

    results = threads.run_ranks(G, lambda t: serve(t, steps=20, background=none_left))
    assert "new thread" in next(e.kept for e in results[0][2] if e.kept)


def test_broken_counters_of_one_rank_are_dropped_and_hang_nobody(caplog) -> None:
    def run(transport):
        balancer, _ = make(transport)
        for step in range(12):
            counts = np.full((L, S // G), -1 if transport.rank == 1 else 5)
            balancer.step(counts if step % 2 else counts.astype(float) + 0.5)
        return balancer.failure

    assert threads.run_ranks(G, run) == [None] * G
    assert sum("are dropped" in r.message for r in caplog.records) == G


def test_the_first_plan_replaces_an_initial_placement_that_nobody_chose() -> None:
    """Nothing is worth keeping of experts in order; a placement that was given is moved little."""
    asked: dict[bool, float] = {}
    for given in (True, False):
        balancer = Balancer(
            L, E, G, S, initial=initial_placement(L, E, S) if given else None, gate=ALWAYS,
            window=LoadWindow(L, E, blocks=16, steps_per_block=1), max_swaps=1,
            check_every=16, rearrange_every=64, record_every=1, plan_steps=0, background=at_once,
        )  # fmt: skip
        for step in range(16):
            event = balancer.step(slot_counts(TRACE[step], balancer.phy2log))
        balancer.close()
        assert event.decided is not None
        asked[given] = event.decided.moved
    assert asked[True] < 0.15 < asked[False]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rearrange_every": 6}, "multiple of check_every"),
        ({"check_every": 0}, "positive intervals"),
    ],
)
def test_wrong_intervals_are_refused(changes, says) -> None:
    with pytest.raises(ShapeError, match=says):
        Balancer(L, E, G, S, **({"check_every": 4, "rearrange_every": 8} | changes))


def test_closing_does_not_wait_for_the_planner() -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(*_, **__):
        entered.set()
        release.wait(60)
        raise AssertionError("nobody asks any more")

    balancer = Balancer(
        L, E, G, S, planner=slow, check_every=1, rearrange_every=1, record_every=1,
        window=LoadWindow(L, E, blocks=2, steps_per_block=1),
    )  # fmt: skip
    balancer.step(slot_counts(TRACE[0], balancer.phy2log))
    assert entered.wait(60)
    balancer.close()
    assert not release.is_set()
    release.set()
