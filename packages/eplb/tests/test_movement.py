"""Movement plans end at the new placement, never hang, and are paired at both ends."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_eplb import MovementPlan, PlanError, ShapeError, TopologyError, movement, simulate
from deepinfer_eplb.placement import keep_slots, moved_share


@st.composite
def placements(draw):
    ranks, per_rank = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    slots = ranks * per_rank
    experts = draw(st.integers(1, slots))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def one() -> np.ndarray:
        spare = rng.integers(0, experts, slots - experts)
        return rng.permutation(np.concatenate([np.arange(experts), spare]))

    old = one()
    new = one()
    keep = rng.random(slots) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    mixed = np.where(keep, old, new)
    if np.unique(mixed).size < experts:
        mixed = new
    return old, mixed, ranks, draw(st.sampled_from([None, 1, 2, 4])), draw(st.integers(1, 9))


@given(placements())
@settings(max_examples=300, deadline=None)
def test_every_rank_ends_with_the_new_placement(case) -> None:
    old, new, ranks, per_node, buckets = case
    made = movement(old, new, ranks, per_node, buckets)
    assert np.array_equal(simulate(made), new)


@given(placements())
@settings(max_examples=150, deadline=None)
def test_unchanged_slots_do_not_move_and_an_expert_is_received_once_a_rank(case) -> None:
    old, new, ranks, per_node, buckets = case
    made = movement(old, new, ranks, per_node, buckets)
    per_rank = old.size // ranks
    for g, moves in enumerate(made.ranks):
        before = set(old[g * per_rank : (g + 1) * per_rank].tolist())
        received = [t.expert for t in made.transfers if t.dst == g]
        assert len(received) == len(set(received))
        assert not before & set(received)
        assert all(old[g * per_rank + c] != new[g * per_rank + c] for c in moves.commit)
    for t in made.transfers:
        assert old[t.src * per_rank + t.src_slot] == t.expert
        assert new[t.dst * per_rank + t.dst_slot] == t.expert


@given(placements())
@settings(max_examples=100, deadline=None)
def test_both_ends_of_a_pair_list_the_same_transfers_in_the_same_order(case) -> None:
    old, new, ranks, per_node, buckets = case
    made = movement(old, new, ranks, per_node, buckets)
    for b in range(buckets):
        for src in range(ranks):
            for dst in range(ranks):
                sent = [t for t in made.ranks[src].buckets[b] if (t.src, t.dst) == (src, dst)]
                got = [t for t in made.ranks[dst].buckets[b] if (t.src, t.dst) == (src, dst)]
                assert sent == got


def run_with_bounded_buffers(orders: list[list[tuple[str, int]]], capacity: int) -> bool:
    """Blocking ranks: each does its operations in order; a send needs room in the pair's channel.

    A step is a list of batches; operations of a batch may finish in any order, as posted at once.
    Returns whether every rank finished.
    """
    channel: dict[tuple[int, int], int] = {}
    queues = [deque(o) for o in orders]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            for batch_op in list(queue[0]) if queue else []:
                kind, peer = batch_op
                key = (rank, peer) if kind == "send" else (peer, rank)
                waiting = channel.get(key, 0)
                if kind == "send" and (waiting < capacity or receiver_ready(queues, key)):
                    channel[key] = waiting + 1
                elif kind == "receive" and waiting > 0:
                    channel[key] = waiting - 1
                else:
                    continue
                queue[0].remove(batch_op)
                moved = True
            if queue and not queue[0]:
                queue.popleft()
                moved = True
    return all(not q for q in queues)


def receiver_ready(queues, key: tuple[int, int]) -> bool:
    src, dst = key
    return bool(queues[dst]) and ("receive", src) in queues[dst][0]


def batches(made: MovementPlan, *, one_by_one: bool = False) -> list[list[list[tuple[str, int]]]]:
    out = []
    for g, moves in enumerate(made.ranks):
        rank: list[list[tuple[str, int]]] = []
        for bucket in moves.buckets:
            ops = [("send", t.dst) if t.src == g else ("receive", t.src) for t in bucket]
            if one_by_one:  # what a naive executor does: all its sends first, each blocking
                rank += [[op] for op in sorted(ops, reverse=True)]
            else:
                rank.append(ops)
        out.append([b for b in rank if b])
    return out


@given(placements(), st.sampled_from([0, 1]))
@settings(max_examples=150, deadline=None)
def test_no_deadlock_even_without_buffers(case, capacity: int) -> None:
    old, new, ranks, per_node, buckets = case
    assert run_with_bounded_buffers(batches(movement(old, new, ranks, per_node, buckets)), capacity)


def test_the_deadlock_test_can_fail() -> None:
    swap = movement(np.array([0, 1]), np.array([1, 0]), 2, buckets=1)
    assert run_with_bounded_buffers(batches(swap), 0)
    assert not run_with_bounded_buffers(batches(swap, one_by_one=True), 0)


def test_a_receiver_is_served_from_its_own_node_first() -> None:
    old = np.array([0, 1, 0, 2])  # ranks 0..3; nodes {0, 1}, {2, 3}
    made = movement(old, np.array([0, 1, 2, 0]), 4, ranks_per_node=2)
    assert [(t.src, t.dst) for t in made.transfers if t.expert == 0] == [(2, 3)]
    assert made.between_nodes(2) == 0


def test_receivers_are_spread_over_holders() -> None:
    old = np.array([0, 0, 1, 2, 3, 4])
    new = np.array([0, 0, 1, 0, 0, 0])
    # experts 2..4 vanish, so this is only about who serves expert 0
    made = movement(old, new, 6)
    sources = sorted(t.src for t in made.transfers)
    assert sources == [0, 0, 1] or sources == [0, 1, 1]


def test_needed_twice_is_received_once() -> None:
    made = movement(np.array([0, 1, 2, 3]), np.array([0, 1, 0, 0]), 2)
    assert len(made.transfers) == 1
    assert made.ranks[1].final_copies == ((0, 1),)


def test_keeping_slots_only_reorders_inside_ranks() -> None:
    out = keep_slots(np.array([3, 1, 2, 0]), np.array([1, 5, 0, 2]), 2)
    assert out.tolist() == [5, 1, 2, 0]


def test_moved_share_counts_experts_that_change_rank() -> None:
    assert moved_share(np.array([[0, 1, 2, 3]]), np.array([[1, 0, 2, 1]]), 2) == 0.25


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((np.array([0, 1]), np.array([0, 1, 2]), 1), ShapeError),
        ((np.array([0, 1, 2]), np.array([0, 1, 2]), 2), TopologyError),
        ((np.array([0, 1]), np.array([0, 2]), 2), PlanError),
    ],
)
def test_misuse_raises(arguments, error) -> None:
    with pytest.raises(error):
        movement(*arguments)
