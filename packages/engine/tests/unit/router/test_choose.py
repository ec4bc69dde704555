"""Which worker gets a request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import prompt, request

from deepinfer_engine.router.choose import BOUND, affinity_key, by_affinity, by_load


@dataclass
class Worker:
    address: str
    load: float = 0.0


def fleet(loads):
    return [Worker(f"10.0.0.{i}:9000", load) for i, load in enumerate(loads)]


def key(*tokens, salt="s"):
    return affinity_key(request("r", tokens, salt=salt))


@given(
    loads=st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    added=st.floats(1, 1e5),
    salt=st.text(max_size=5),
)
def test_affinity_never_overloads_a_worker(loads, added, salt):
    workers = fleet(loads)
    chosen = by_affinity(workers, key(1, 2, salt=salt), added)
    mean = (sum(loads) + added) / len(loads)
    assert chosen.load + added <= max((1 + BOUND) * mean, min(loads) + added)


def test_turns_of_one_conversation_go_to_one_worker():
    start = prompt(1, 300)
    turns = [by_affinity(fleet([0, 0, 0, 0]), key(*start, *prompt(n, n)), 1) for n in range(9)]
    assert len({w.address for w in turns}) == 1


def test_conversations_and_users_spread_over_the_fleet():
    for keys in (
        [key(*prompt(n, 50)) for n in range(200)],
        [key(1, salt=str(n)) for n in range(200)],
    ):
        chosen = [by_affinity(fleet([0, 0, 0, 0]), k, 1).address for k in keys]
        assert min(chosen.count(w.address) for w in fleet([0] * 4)) > 25


def test_a_worker_that_leaves_moves_only_its_own_conversations():
    keys = [key(*prompt(n, 50)) for n in range(200)]
    whole = fleet([0, 0, 0, 0])
    before = [by_affinity(whole, k, 1).address for k in keys]
    after = [by_affinity(whole[:3], k, 1).address for k in keys]
    stayed = [a == b for a, b in zip(before, after, strict=True) if a != whole[3].address]
    assert all(stayed)


def test_a_shared_beginning_does_not_send_everything_to_one_worker():
    workers = fleet([0, 0, 0, 0])
    for _ in range(400):
        by_affinity(workers, key(*prompt(1, 300)), 10).load += 10
    mean = sum(w.load for w in workers) / 4
    assert max(w.load for w in workers) <= (1 + BOUND) * mean + 10


@pytest.mark.parametrize("loads", [[5, 3, 9], [3, 5, 9], [9, 5, 3]])
def test_decode_goes_where_least_is_loaded(loads):
    assert by_load(fleet(loads), key(1)).load == 3


def test_equal_loads_are_not_broken_by_position():
    chosen = {by_load(fleet([0, 0, 0, 0]), key(n)).address for n in range(100)}
    assert len(chosen) == 4
