"""Who runs in a worse class makes room for a more urgent request, and comes back."""

from __future__ import annotations

import pytest
from policy import BLOCK, add, made_up, scheduler, turn
from toy_engine import alone, greedy, hand_loop, prompt, request, run_dry, toy

from deepinfer_engine.core.admission import HOLD_S, MOST_RECOMPUTED
from deepinfer_engine.core.sequence import LiveSequence, Phase


class Garage:
    """Parking with so many places."""

    def __init__(self, places: int = 100) -> None:
        self.places, self.parked = places, set[str]()

    def park(self, seq):
        if len(self.parked) >= self.places:
            return False
        self.parked.add(seq.key)
        return True

    def resume(self, seq):
        self.parked.remove(seq.key)

    def drop(self, seq):
        self.parked.remove(seq.key)


def parking(s, places=100):
    s.at.parking = Garage(places)
    return s


def running(s, *names, priority):
    seqs = [add(s, name, BLOCK, priority=priority) for name in names]
    while any(seq.phase is not Phase.RUNNING for seq in seqs):
        turn(s)
    return seqs


def test_who_runs_in_a_worse_class_gives_its_place_and_comes_back():
    s = parking(scheduler(max_num_seqs=1))
    (low,) = running(s, "low", priority=2)
    urgent = add(s, "urgent", 10, priority=1, max_tokens=2)
    turn(s)
    assert (low.phase, urgent.phase) == (Phase.PARKED, Phase.RUNNING)
    assert s.counters["urgent_preemptions"] == 1
    while low.phase is Phase.PARKED:
        turn(s)
    assert urgent.phase is Phase.FINISHED
    assert low.phase is Phase.RUNNING


def test_where_nothing_can_be_parked_it_is_computed_again():
    s = scheduler(max_num_seqs=1)
    (low,) = running(s, "low", priority=1)
    add(s, "urgent", 10, max_tokens=1)
    turn(s)
    assert low.phase is Phase.WAITING
    turn(s)
    turn(s)
    assert low.phase is Phase.RUNNING


@pytest.mark.parametrize("priority", [0, 5])
def test_nobody_makes_room_for_its_own_class_or_a_worse_one(priority):
    s = parking(scheduler(max_num_seqs=1))
    (runs,) = running(s, "runs", priority=0)
    add(s, "waits", 10, priority=priority)
    turn(s, 1000.0)  # it has waited long; that is no urgency
    assert runs.phase is Phase.RUNNING


def test_who_came_long_ago_has_become_as_urgent():
    s = parking(scheduler(max_num_seqs=1, age_s=10.0))
    (runs,) = running(s, "runs", priority=1)
    add(s, "late", 10, priority=0, now=10.0)
    turn(s, 10.0)
    assert runs.phase is Phase.RUNNING


def test_no_more_make_room_than_are_needed_the_worst_class_and_longest_answer_first():
    s = parking(scheduler(blocks=9, nextn=0, decode_reserve_tokens=0, max_gap=0.0))
    short, mid = running(s, "short", "mid", priority=3)
    mid.tokens += [1] * 3
    mid.num_tokens += 3
    (better,) = running(s, "better", priority=2)
    free = s.pools.blocks.free
    urgent = add(s, "urgent", free * BLOCK + 1)
    turn(s)
    assert mid.phase is Phase.PARKED
    assert (short.phase, better.phase) == (Phase.RUNNING, Phase.RUNNING)
    assert urgent.phase is not Phase.WAITING
    s.pools.audit()


def test_nobody_makes_room_where_that_would_not_be_enough():
    s = parking(scheduler(blocks=9, nextn=0, decode_reserve_tokens=0, max_gap=0.0))
    (low,) = running(s, "low", priority=3)
    (same,) = running(s, "same", priority=0)
    urgent = add(s, "urgent", 8 * BLOCK - 1)
    turn(s)
    assert urgent.phase is Phase.WAITING
    assert (low.phase, same.phase) == (Phase.RUNNING, Phase.RUNNING)
    assert not s.counters["preemptions"]


def test_who_was_computed_again_often_makes_room_no_more():
    s = scheduler(max_num_seqs=1)
    (low,) = running(s, "low", priority=1)
    low.preemptions = MOST_RECOMPUTED
    add(s, "urgent", 10)
    turn(s)
    assert low.phase is Phase.RUNNING


def test_nobody_makes_room_in_a_step_that_runs_but_before_the_next_one():
    s = parking(scheduler(max_num_seqs=1))
    (low,) = running(s, "low", priority=2)
    first = s.plan(1.0)
    urgent = add(s, "urgent", 10)
    assert s.admit(1.5) == []
    assert s.plan(1.5) is None, "another step would keep it busy for good"
    s.absorb(first, made_up(first))
    s.settle(first)
    turn(s, 2.0)
    assert (low.phase, urgent.phase) == (Phase.PARKED, Phase.RUNNING)


def decoding(s, name, priority):
    """A sequence whose prompt was computed elsewhere."""
    reservation = s.reserve(BLOCK, priority)
    if reservation is None:
        return None
    asked = request(name, prompt(1, BLOCK), greedy(ignore_eos=True, priority=priority))
    seq = LiveSequence(asked, name, 0.0)
    seq.tokens.append(1)
    s.start(seq, reservation)
    return seq


def test_a_decode_worker_makes_room_and_keeps_it_until_it_is_asked_again():
    s = parking(scheduler("decode", max_num_seqs=1))
    low = decoding(s, "low", 2)
    assert decoding(s, "urgent", 0) is None
    assert s.plan(0.0) is None, "the only one has made room"
    assert s.plan(0.5) is None
    assert low.phase is Phase.PARKED
    urgent = decoding(s, "urgent", 0)
    turn(s, 1.0)
    assert (low.phase, urgent.phase) == (Phase.PARKED, Phase.RUNNING)


def test_room_that_nobody_comes_for_is_given_back():
    s = parking(scheduler("decode", max_num_seqs=1))
    low = decoding(s, "low", 2)
    assert s.reserve(BLOCK, 0) is None
    s.plan(0.0)
    assert low.phase is Phase.PARKED
    s.plan(HOLD_S)
    assert low.phase is Phase.RUNNING


def test_a_decode_worker_that_cannot_park_ends_nobody_for_an_urgent_one():
    s = parking(scheduler("decode", max_num_seqs=1), places=0)
    low = decoding(s, "low", 2)
    assert s.reserve(BLOCK, 0) is None
    plan = s.plan(0.0)
    assert [seq.key for seq, _ in plan.rows] == ["low"]
    assert low.phase is Phase.RUNNING
    assert s.take_ended() == []


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("park_bytes", [0, 1 << 20], ids=["recomputed", "parked"])
def test_who_made_room_says_what_it_says_alone(overlap, park_bytes):
    loop, sink = hand_loop(toy(), max_num_seqs=2, overlap=overlap, park_bytes=park_bytes)
    asked = {f"low{i}": (prompt(i, 9), greedy(20, priority=1)) for i in range(2)}
    asked |= {f"urgent{i}": (prompt(9 + i, 20), greedy(5)) for i in range(2)}
    for name in ("low0", "low1"):
        loop.submit(request(name, *asked[name]), name, 0.0)
    while min(len(sink.tokens.get(n, ())) for n in ("low0", "low1")) < 3:
        loop.step(0.0)
    for name in ("urgent0", "urgent1"):
        loop.submit(request(name, *asked[name]), name, 0.0)
    run_dry(loop)
    loop.close()
    assert loop.scheduler.counters["urgent_preemptions"] == 2
    assert {name: sink.tokens[name] for name in asked} == {
        name: alone(*each) for name, each in asked.items()
    }
    loop.audit()
