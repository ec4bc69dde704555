"""Which worker gets a request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import prompt, request

from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.router.choose import (
    BOUND,
    QUEUE_WEIGHT,
    Candidate,
    affinity_key,
    by_room,
    by_ttft,
)
from deepinfer_engine.router.scoring import check_wait


@dataclass
class Worker:
    address: str
    held: float = 0.0
    capacity: float = 1000.0
    late: bool = False


def fleet(held, capacities=None):
    rows = zip(held, capacities or [1000.0] * len(held), strict=True)
    return [Worker(f"10.0.0.{i}:9000", *row) for i, row in enumerate(rows)]


def candidates(loads, costs=None, queues=None):
    """Prefill workers with so much work, now or lately, and a price for this prompt."""
    costs = costs or [10.0] * len(loads)
    queues = queues or [0.0] * len(loads)
    rows = zip(loads, queues, costs, strict=True)
    return [Candidate(i, f"10.0.0.{i}:9000", *row) for i, row in enumerate(rows)]


def key(*tokens, salt="s"):
    return affinity_key(request("r", tokens, salt=salt))


@given(
    rows=st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0.1, 1e5), st.floats(0, 1e6)),
        min_size=1,
        max_size=8,
    ),
    salt=st.binary(max_size=5),
)
def test_locality_never_overloads_a_worker(rows, salt):
    """I-44."""
    loads, costs, queues = map(list, zip(*rows, strict=True))
    chosen = by_ttft(candidates(loads, costs, queues), salt)
    mean = (sum(loads) + min(costs)) / len(loads)
    bound = max((1 + BOUND) * mean, min(loads) + chosen.cost_ms)
    assert chosen.load + chosen.cost_ms <= bound


def test_a_conversation_s_own_worker_keeps_it_whatever_it_has_done_while_it_is_idle():
    for home, queue, expected in ((True, 0.0, True), (True, 1.0, False), (False, 0.0, False)):
        found = candidates([9000.0, 0.0, 0.0], costs=[10.0, 500.0, 500.0], queues=[queue, 0, 0])
        found[0] = dataclasses.replace(found[0], home=home)
        assert (by_ttft(found, b"k").worker == 0) == expected


def test_of_equally_good_workers_the_conversation_s_own_is_taken():
    found = [Candidate(i, f"a{i}:1", 0.0, 0.0, 10.0, home=i == 2) for i in range(4)]
    assert {by_ttft(found, bytes([n])).worker for n in range(20)} == {2}


def test_a_new_conversation_does_not_go_where_much_was_done_lately():
    found = candidates([40.0, 40.0, 40.0, 60.0])
    assert {by_ttft(found, bytes([n])).worker for n in range(40)} == {0, 1, 2}


def test_a_long_prompt_weighs_more_than_a_short_one():
    """One long prompt on one worker, three short ones on the other: by count it looks idle."""
    found = candidates([900.0, 30.0], queues=[900.0, 30.0])
    assert {by_ttft(found, bytes([n])).worker for n in range(20)} == {1}


def test_what_is_cached_is_worth_a_wait_of_twice_what_it_saves_and_no_more():
    saved = 90.0
    worth = saved / QUEUE_WEIGHT
    for queue, expected in ((0.9 * worth, 0), (1.1 * worth, 1)):
        found = candidates([500.0, 500.0], costs=[10.0, 10.0 + saved], queues=[queue, 0.0])
        assert by_ttft(found, b"k").worker == expected


@pytest.mark.parametrize(
    ("target", "chosen"),
    [(None, 1), (50.0, 1), (200.0, 0), (5.0, 1)],
    ids=["none", "one is in time", "both are in time", "none is in time"],
)
def test_with_a_target_a_wait_within_it_costs_nothing(target, chosen):
    """Waiting for what is cached, or computing it elsewhere at once."""
    found = candidates([500.0, 500.0], costs=[10.0, 40.0], queues=[100.0, 0.0])
    assert by_ttft(found, b"k", target).worker == chosen


@given(
    rows=st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0.1, 1e5), st.floats(0, 1e6)),
        min_size=1,
        max_size=8,
    ),
    target=st.floats(1, 1e6),
)
def test_a_target_overloads_no_worker_either(rows, target):
    loads, costs, queues = map(list, zip(*rows, strict=True))
    chosen = by_ttft(candidates(loads, costs, queues), b"k", target)
    mean = (sum(loads) + min(costs)) / len(loads)
    assert chosen.load + chosen.cost_ms <= max((1 + BOUND) * mean, min(loads) + chosen.cost_ms)


def test_turns_of_one_conversation_go_to_one_worker():
    start = prompt(1, 300)
    turns = [by_ttft(candidates([0] * 4), key(*start, *prompt(n, n))) for n in range(9)]
    assert len({w.address for w in turns}) == 1


def test_workers_that_are_nearly_equal_are_not_told_apart_by_little():
    found = [candidates([0] * 4, costs=[10.0 + n / 100 * ((i + n) % 4) for i in range(4)])
             for n in range(5)]  # fmt: skip
    assert len({by_ttft(one, b"conversation").worker for one in found}) == 1


def test_conversations_and_users_spread_over_the_fleet():
    for keys in (
        [key(*prompt(n, 50)) for n in range(200)],
        [key(1, salt=str(n)) for n in range(200)],
    ):
        chosen = [by_ttft(candidates([0] * 4), k).worker for k in keys]
        assert min(chosen.count(w) for w in range(4)) > 25


def test_a_worker_that_leaves_moves_only_its_own_conversations():
    keys = [key(*prompt(n, 50)) for n in range(200)]
    whole = candidates([0] * 4)
    before = [by_ttft(whole, k).worker for k in keys]
    after = [by_ttft(whole[:3], k).worker for k in keys]
    stayed = [a == b for a, b in zip(before, after, strict=True) if a != 3]
    assert all(stayed)


def test_a_shared_beginning_does_not_send_everything_to_one_worker():
    loads = [0.0] * 4
    for _ in range(400):
        found = candidates(loads, queues=loads)
        loads[by_ttft(found, key(*prompt(1, 300))).worker] += 10
    assert max(loads) <= (1 + BOUND) * sum(loads) / 4 + 10


@pytest.mark.parametrize("loads", [[5, 3, 9], [3, 5, 9], [9, 5, 3]])
def test_decode_goes_where_least_is_loaded(loads):
    assert by_room(fleet(loads), 10, key(1)).held == 3


@pytest.mark.parametrize(
    ("held", "capacities", "chosen"),
    [
        ([800, 850], [1000, 4000], 1),
        ([100, 850], [1000, 4000], 0),
        ([900, 1900], [1000, 4000], 1),
        ([900, 950], [1000, 1000], 0),
    ],
    ids=["full before long", "both have room", "no room at all", "both are full"],
)
def test_decode_goes_where_there_is_room(held, capacities, chosen):
    workers = fleet(held, capacities)
    assert by_room(workers, 100, key(1)) is workers[chosen]


def test_decode_goes_where_tokens_stay_within_their_target():
    workers = fleet([10, 500, 700])
    workers[0].late = True
    assert by_room(workers, 10, key(1)) is workers[1]
    for worker in workers:
        worker.late = True
    assert by_room(workers, 10, key(1)) is workers[0], "where all are late, as ever"


def test_equal_loads_are_not_broken_by_position():
    chosen = {by_room(fleet([0, 0, 0, 0]), 10, key(n)).address for n in range(100)}
    assert len(chosen) == 4


def sent_away(priority, soonest_s, limit_s):
    one = request("r", (1, 2))
    sampling = one.sampling.__class__(priority=priority, seed=0)
    one = request("r", (1, 2), sampling)
    try:
        check_wait(one, 1000 * soonest_s, limit_s)
    except EngineUnavailable as error:
        return error.retry_after_s >= 1
    return False


def test_who_would_wait_too_long_is_sent_away_the_last_classes_first():
    classes = (5, 0, -1)
    shed = {wait: [p for p in classes if sent_away(p, wait, 10)] for wait in (4, 6, 11, 21)}
    assert shed == {4: [], 6: [5], 11: [5, 0], 21: [5, 0, -1]}
    assert not any(sent_away(p, 1e6, None) for p in classes)
