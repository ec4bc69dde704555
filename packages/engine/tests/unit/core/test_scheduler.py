"""The policy alone: no runner, outputs made up by the test."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy import BLOCK, add, kind, scheduler, turn

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import StepOutput
from deepinfer_engine.core.sequence import Phase
from deepinfer_engine.core.windows import NOTHING
from deepinfer_engine.errors import ConfigError


def test_requests_behind_a_blocked_head_overtake_within_bounds():
    s = scheduler(blocks=14, skip_ahead=2, hol_s=5.0, decode_reserve_tokens=0)
    add(s, "runs", 8 * BLOCK)
    turn(s)
    for name, length in [("big", 9 * BLOCK), ("a", 4), ("b", 4), ("c", 4)]:
        add(s, name, length)
    assert [seq.key for seq in s.admit(1.0)] == ["a", "b"], "two may overtake, and no third"
    assert s.admit(1.1) == []


def test_everything_that_fits_is_admitted_at_once():
    s = scheduler(blocks=400, slots=100, skip_ahead=0, max_num_seqs=50)
    for i in range(60):
        add(s, f"r{i}", 20)
    assert [seq.key for seq in s.admit(0.0)] == [f"r{i}" for i in range(50)]


def test_a_head_overtaken_for_too_long_is_not_overtaken_any_more():
    s = scheduler(blocks=12, hol_s=5.0, decode_reserve_tokens=0)
    add(s, "runs", 8 * BLOCK)
    turn(s)
    add(s, "big", 9 * BLOCK)
    add(s, "a", 4)
    assert [seq.key for seq in s.admit(1.0)] == ["a"]
    add(s, "b", 4)
    assert s.admit(7.0) == []


def test_admission_leaves_room_for_what_runs_to_grow():
    s = scheduler(blocks=9, decode_reserve_tokens=BLOCK)
    add(s, "first", 4 * BLOCK)
    add(s, "second", 3 * BLOCK)
    assert [seq.key for seq in s.admit(0.0)] == ["first"], "8 blocks - 4 - 3 leave 1, 2 are due"


def test_an_idle_worker_admits_whatever_fits_at_all():
    s = scheduler(blocks=9, decode_reserve_tokens=BLOCK)
    add(s, "only", 8 * BLOCK - 1)
    assert len(s.admit(0.0)) == 1


def test_prefill_waits_its_turn_while_others_decode():
    s = scheduler(prefill_every_steps=3, prefill_urgent_s=100.0, max_gap=0.0)
    add(s, "a", 10)
    turn(s)
    add(s, "b", 10)
    kinds = [kind(turn(s)[0]) for _ in range(4)]
    assert kinds == ["decode"] * 3 + ["prefill"]


def test_an_old_request_is_prefilled_after_one_decode_step():
    s = scheduler(prefill_every_steps=100, prefill_urgent_s=1.0, max_gap=0.0)
    add(s, "a", 10)
    turn(s)
    add(s, "b", 10, now=0.0)
    kinds = [kind(turn(s, now=2.0)[0]) for _ in range(2)]
    assert kinds == ["decode", "prefill"]


def test_the_longest_output_is_preempted_first_and_the_shortest_served_first():
    s = scheduler(blocks=4, nextn=0, decode_reserve_tokens=0, skip_ahead=0, max_gap=0.0)
    old = add(s, "old", BLOCK)
    turn(s)
    for _ in range(BLOCK - 1):
        turn(s)
    young = add(s, "young", BLOCK - 1)
    turn(s)
    assert (old.phase, young.phase) == (Phase.RUNNING, Phase.RUNNING)
    while young.phase is Phase.RUNNING and old.phase is Phase.RUNNING:
        turn(s)
    assert (young.phase, old.phase) == (Phase.RUNNING, Phase.WAITING)
    assert old.prompt_len == len(old.tokens), "its output is read again like a prompt"


def test_of_several_the_longest_output_makes_room():
    s = scheduler(blocks=6, nextn=0, decode_reserve_tokens=0, prefill_every_steps=1, max_gap=0.0)
    old = add(s, "old", 20)
    turn(s)
    turn(s)
    mid = add(s, "mid", 20)
    for _ in range(3):
        turn(s)
    young = add(s, "young", BLOCK)
    while not s.counters["preemptions"]:
        turn(s)
    # `old` had 4 tokens, `mid` 3 and `young` 1 when `young` found no block.
    assert (old.phase, old.output_len) == (Phase.WAITING, 4)
    assert (mid.output_len, young.output_len) == (4, 2)
    assert (mid.phase, young.phase) == (Phase.RUNNING, Phase.RUNNING)


def test_fewer_drafts_are_verified_before_anyone_is_preempted():
    s = scheduler(blocks=2, nextn=2)
    add(s, "a", BLOCK - 1)
    turn(s)
    plan, _ = turn(s)
    assert [drafts for _, drafts in plan.rows] == [0]


def test_snapshots_use_spare_slots_for_the_borders_nearest_the_end():
    s = scheduler("prefill", slots=4, keep_snapshots=True)
    add(s, "a", 5 * BLOCK + 3)
    plan, _ = turn(s)
    (chunk,) = plan.chunks
    assert [position for position, _ in chunk.snapshots] == [4 * BLOCK, 5 * BLOCK]
    assert len({slot for _, slot in chunk.snapshots} | {chunk.seq.state_slot}) == 3
    assert s.pools.states.free == 2, "spare slots come back with the step"


def test_a_prefilled_sequence_keeps_its_memory_until_it_is_released():
    s = scheduler("prefill")
    seq = add(s, "a", 40)
    turn(s)
    assert (seq.phase, s.pools.blocks.owned) == (Phase.PREFILLED, 3)
    s.release("a")
    s.release("a")
    assert (seq.phase, s.pools.blocks.owned) == (Phase.FINISHED, 0)


def test_a_sequence_aborted_during_its_step_keeps_its_memory_until_the_step_is_over():
    s = scheduler()
    seq = add(s, "a", 40)
    s.ready(*s.admit(0.0), NOTHING)
    plan = s.plan(0.0)
    s.abort("a")
    assert s.pools.blocks.owned == 3
    s.absorb(plan, [StepOutput((1,))])
    (end,) = s.settle(plan)
    assert (end.seq, end.tokens, end.finish) == (seq, (), "abort")
    assert s.pools.blocks.owned == 0


def test_reservations_count_as_running_and_are_given_back():
    s = scheduler("decode", blocks=20, max_num_seqs=2, decode_reserve_tokens=0)
    first, second = s.reserve(30), s.reserve(30)
    assert first is not None
    assert second is not None
    assert s.reserve(1) is None
    s.cancel(first)
    assert s.reserve(1) is not None


def test_a_budget_smaller_than_a_block_is_refused():
    with pytest.raises(ConfigError, match="one block"):
        scheduler(max_num_batched_tokens=BLOCK - 1)


@pytest.mark.parametrize("wrong", [{"max_num_seqs": 0}, {"hol_s": -1.0}])
def test_a_setting_without_meaning_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_chunks_cover_every_prompt_once_within_the_budget(data):
    draw = data.draw
    random = draw(st.integers(0, 1 << 32).map(Random))
    budget = draw(st.integers(1, 4)) * BLOCK
    s = scheduler(
        draw(st.sampled_from(["prefill", "both"])),
        blocks=draw(st.integers(8, 60)),
        slots=draw(st.integers(2, 12)),
        keep_snapshots=draw(st.booleans()),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=budget,
    )
    fed: dict[str, int] = {}
    ended: set[str] = set()
    waiting = [draw(st.integers(1, 6 * BLOCK)) for _ in range(draw(st.integers(1, 8)))]
    added = 0
    while waiting or s.unfinished:
        if waiting and random.random() < 0.5:
            add(s, f"r{added}", waiting.pop(), max_tokens=random.randint(1, 40))
            added += 1
        plan, progress = turn(s, emit=random.randint(1, 3))
        s.pools.audit()
        for one in progress + s.take_ended():
            if one.finish is not None:
                assert one.seq.key not in ended
                ended.add(one.seq.key)
            elif s.role == "prefill":
                s.release(one.seq.key)
                ended.add(one.seq.key)
        if plan is not None and plan.chunks:
            assert plan.prompt_tokens <= budget
            assert len(plan.chunks) <= s.config.max_num_seqs
            for c in plan.chunks:
                again = c.seq.preemptions and c.start == 0
                assert c.start == (0 if again else fed.get(c.seq.key, 0))
                assert c.end == c.seq.prompt_len or c.end % BLOCK == 0 or plan.rows
                assert all(c.start < p <= c.end and p % BLOCK == 0 for p, _ in c.snapshots)
                fed[c.seq.key] = c.end
        if plan is not None and plan.rows:
            assert len(plan.rows) <= s.config.max_num_seqs
            for seq, drafts in plan.rows:
                if seq.phase is Phase.RUNNING:
                    assert seq.num_tokens == len(seq.tokens) - 1
                    assert drafts <= s.caps.nextn
    assert len(ended) == added
    assert s.pools.blocks.owned == 0
    assert s.pools.states.owned == 0
