"""Who is served first: priority, shares of users, deadlines, bounded overtaking, forks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy import BLOCK, add, kind, made_up, scheduler, turn
from toy_engine import alone, greedy, hand_loop, prompt, request, run_dry, toy

from deepinfer_engine.core.fairness import Accounts
from deepinfer_engine.core.pacing import AGAIN, LEAST, Pace
from deepinfer_engine.core.runner import StepOutput
from deepinfer_engine.core.sequence import LiveSequence, Phase
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.core.windows import NOTHING


def admitted(s, now=0.0):
    return [seq.key for seq in s.admit(now)]


def test_a_lower_priority_number_is_served_first():
    s = scheduler(max_num_seqs=2)
    for name, priority in [("late", 5), ("normal", 0), ("urgent", -1), ("other", 0)]:
        add(s, name, 10, priority=priority)
    assert admitted(s) == ["urgent", "normal"]


def test_waiting_raises_the_class_so_that_nothing_starves():
    s = scheduler(max_num_seqs=1, age_s=10.0)
    add(s, "old", 10, priority=3, now=0.0)
    add(s, "new", 10, priority=0, now=31.0)
    assert admitted(s, 31.0) == ["old"], "three classes in thirty seconds, and it came first"


def test_of_one_class_the_nearest_deadline_goes_first():
    s = scheduler(max_num_seqs=2)
    for name, timeout in [("a", None), ("b", 60.0), ("c", 5.0)]:
        add(s, name, 10, timeout_s=timeout)
    assert admitted(s) == ["c", "b"]


def test_a_user_with_many_requests_does_not_hold_up_another():
    s = scheduler(blocks=400, slots=100, max_num_seqs=4)
    for i in range(20):
        add(s, f"many{i}", 32, salt="key/heavy")
    add(s, "one", 32, salt="key/light")
    add(s, "two", 32, salt="key/light")
    assert admitted(s) == ["many0", "one", "many1", "two"]


def test_user_names_do_not_multiply_the_share_of_a_key():
    s = scheduler(blocks=400, slots=100, max_num_seqs=8)
    for i in range(20):
        add(s, f"many{i}", 32, salt=f"first/user{i}")
    for i in range(20):
        add(s, f"other{i}", 32, salt="second")
    kinds = Counter(name[:4] for name in admitted(s))
    assert kinds == {"many": 4, "othe": 4}


def test_tokens_that_were_generated_count_too():
    s = scheduler(blocks=400, slots=100, max_num_seqs=2)
    add(s, "talker", 16, salt="talks")
    turn(s)
    for _ in range(40):
        turn(s)
    add(s, "again", 16, salt="talks")
    add(s, "other", 16, salt="quiet")
    assert admitted(s) == ["other"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60))
def test_an_absence_saves_nothing_up(served):
    accounts = Accounts()
    for name in "ab":
        accounts.enter(name)
    for name, tokens in served:
        if name in accounts.spent:
            accounts.clock = max(accounts.clock, accounts.spent[name])
            accounts.charge(name, tokens)
    accounts.enter("c")
    assert accounts.spent["c"] == accounts.clock


def test_accounts_of_those_who_left_are_bounded():
    accounts = Accounts()
    accounts.enter("stays")
    for i in range(20_000):
        accounts.enter(str(i))
        accounts.charge(str(i), 10)
        accounts.leave(str(i))
    assert len(accounts.spent) < 10_000


def test_the_worst_class_makes_room_whatever_it_has_said():
    s = scheduler(blocks=5, nextn=0, decode_reserve_tokens=0, max_gap=0.0)
    low = add(s, "low", BLOCK, priority=5)
    high = add(s, "high", BLOCK)
    turn(s)
    high.tokens += [1] * 3  # the longer output: without classes it would go
    high.num_tokens += 3
    while not s.counters["preemptions"]:
        turn(s)
    assert (low.phase, high.phase) == (Phase.WAITING, Phase.RUNNING)


def test_a_short_prompt_does_not_wait_behind_a_long_one():
    s = scheduler(blocks=400, slots=100, max_num_batched_tokens=4 * BLOCK)
    add(s, "long", 40 * BLOCK)
    turn(s)
    add(s, "short", 10)
    plan, _ = turn(s)
    assert [(c.seq.key, c.end - c.start) for c in plan.chunks] == [
        ("long", 3 * BLOCK),
        ("short", 10),
    ]


def test_prompts_that_come_later_never_take_the_half_of_the_first():
    s = scheduler(blocks=900, slots=100, max_num_batched_tokens=4 * BLOCK, max_num_seqs=90)
    first = add(s, "first", 40 * BLOCK)
    steps = 0
    while first.output_len == 0:
        add(s, f"short{steps}", 3 * BLOCK, max_tokens=1)
        turn(s)
        steps += 1
    assert steps <= 20


# -- mixed steps ----------------------------------------------------------------------------------


def test_prompts_are_read_beside_what_runs():
    s = scheduler(blocks=400, slots=100)
    add(s, "runs", 10)
    turn(s, 0.0)
    add(s, "long", 20 * BLOCK)
    kinds = [kind(turn(s, 1.0 + n)[0]) for n in range(3)]
    assert kinds == ["decode", "mixed", "mixed"], "one step alone tells how long one usually takes"


def simulated(pace, usual, per_token, steps, most=4096):
    """Seconds of each step that reads, on a machine that takes so long."""
    gaps, read = [], 0
    for _ in range(steps):
        tokens = pace.tokens(4, most)
        seconds = usual + per_token * tokens
        pace.took(4, tokens, seconds)
        if tokens:
            gaps.append(seconds)
            read += tokens
    return gaps, read


@pytest.mark.parametrize("usual", [0.002, 0.01, 0.1])
@pytest.mark.parametrize("per_token", [1e-5, 2e-4])
def test_a_step_that_reads_takes_a_few_usual_ones(usual, per_token):
    gaps, read = simulated(Pace(3.0), usual, per_token, 200)
    target = 3.0 * usual
    floor = usual + per_token * LEAST
    settled = gaps[60:]
    assert max(settled) <= max(1.3 * target, floor)
    full = usual + per_token * 4096
    assert min(settled) >= min(0.7 * target, full), "as much as it may"
    assert read


@pytest.mark.parametrize("seen", [True, False], ids=["seen before", "for the first time"])
def test_a_prompt_behind_a_long_cached_beginning_reads_less_from_its_first_step_on(seen):
    pace, usual = Pace(3.5), 0.003

    def read(start, end):
        """In usual steps, how long each took that read a prompt from start to end."""
        took = []
        while start < end:
            tokens = pace.tokens(1, end - start, start)
            seconds = 0.0045 + tokens * (1.5e-4 + 2e-8 * start) if tokens else usual
            pace.took(1, tokens, seconds, start)
            start += tokens
            took.append(seconds / usual)
        return took

    if seen:
        assert max(read(0, 9000)) < 4
    for _ in range(20):
        assert max(read(0, 300)) < 4
    assert max(read(8000, 9000)) < 4


def test_the_usual_step_is_measured_again():
    pace = Pace(3.0)
    zeros = sum(pace.tokens(4, 100) == 0 or pace.took(4, 16, 0.1) for _ in range(3 * AGAIN))
    assert zeros
    pace.took(4, 0, 0.05)
    assert pace.tokens(4, 100) > 0


def test_the_first_prompt_of_a_step_always_goes_on():
    s = scheduler(blocks=400, slots=100, max_num_seqs=40, max_num_batched_tokens=32)
    for i in range(20):
        add(s, f"r{i}", 5)
    while any(q.phase is not Phase.RUNNING for q in s.at.by_key.values()):
        turn(s)
    late = add(s, "late", 200)
    for n in range(40):
        turn(s, float(n))
    assert late.output_len, "rows and drafts fill the budget; prompts get a little all the same"


# -- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3 * BLOCK, 3 * BLOCK + 1, 3 * BLOCK + 7])
def test_equal_prompts_share_the_blocks_they_fill(length):
    s = scheduler(blocks=100, slots=10, nextn=0)
    seqs = [add(s, f"r{i}", length, seed=1) for i in range(4)]
    plan, _ = turn(s)
    assert plan.prompt_tokens == length - 1, "read once, up to its last token"
    plan, _ = turn(s)
    assert [c.end - c.start for c in plan.chunks] == [1] * 4
    assert s.counters["forked_prompts"] == 3
    full = (length - 1) // BLOCK
    assert all(seq.blocks[:full] == seqs[0].blocks[:full] for seq in seqs)
    assert len({seq.blocks[full] for seq in seqs}) == 4
    assert len({seq.state_slot for seq in seqs}) == 4
    s.pools.audit()
    for seq in seqs:
        s.abort(seq.key)
        s.pools.audit()
    assert s.pools.blocks.owned == 0


def test_forks_of_a_prompt_that_is_given_up_are_read_by_themselves():
    s = scheduler(blocks=100, slots=10, max_num_batched_tokens=2 * BLOCK)
    original = add(s, "original", 6 * BLOCK, seed=1)
    forks = [add(s, f"fork{i}", 6 * BLOCK, seed=1) for i in range(2)]
    turn(s)
    s.abort(original.key)
    assert {f.phase for f in forks} == {Phase.WAITING}
    while not all(f.output_len for f in forks):
        turn(s)
        s.pools.audit()
    assert s.counters["forked_prompts"] == 1


def test_a_fork_is_aborted_while_it_waits():
    s = scheduler(blocks=100, slots=10, max_num_batched_tokens=2 * BLOCK)
    add(s, "original", 6 * BLOCK, seed=1)
    add(s, "fork", 6 * BLOCK, seed=1)
    turn(s)
    s.abort("fork")
    assert [(one.seq.key, one.finish) for one in s.take_ended()] == [("fork", "abort")]
    s.abort("original")
    assert s.pools.blocks.owned == s.pools.states.owned == 0


@pytest.mark.parametrize("window", [12, 0], ids=["state", "stateless"])
@pytest.mark.parametrize("length", [1, 2, 24, 25, 31])
def test_forks_say_what_each_says_alone(window, length):
    runner = toy(window=window, num_state_slots=16 if window else 1)
    loop, sink = hand_loop(runner)
    tokens = prompt(3, length)
    samplings = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in range(5)
    ]
    for i, sampling in enumerate(samplings):
        loop.submit(request(f"r{i}", tokens, sampling), f"r{i}", 0.0)
    run_dry(loop)
    assert loop.scheduler.counters["forked_prompts"] == (4 if length > 1 else 0)
    for i, sampling in enumerate(samplings):
        assert sink.tokens[f"r{i}"] == alone(tokens, sampling, window=window)
    loop.audit()


def test_users_do_not_share_a_fork():
    s = scheduler(blocks=100, slots=10)
    add(s, "a", 20, seed=1, salt="key/a")
    add(s, "b", 20, seed=1, salt="key/b")
    turn(s)
    assert not s.counters["forked_prompts"]


# -- a step that is planned while another runs -----------------------------------------------------


def test_memory_covers_the_most_that_a_running_step_may_commit():
    s = scheduler(blocks=100, slots=10, nextn=3)
    seq = add(s, "a", BLOCK - 2)
    turn(s)
    first = s.plan(1.0)
    second = s.plan(2.0)
    (_, d1), (_, d2) = first.rows[0], second.rows[0]
    most = len(seq.tokens) + (1 + d1) + d2
    assert len(seq.blocks) * BLOCK >= most
    s.absorb(first, made_up(first, emit=4))
    s.settle(first)
    s.absorb(second, made_up(second, emit=4))
    s.settle(second)
    assert (seq.ahead, seq.ahead_most, seq.in_use) == (0, 0, False)
    assert seq.num_tokens == len(seq.tokens) - 1


def test_a_sequence_that_ends_in_a_running_step_keeps_its_memory_until_the_next_is_over():
    s = scheduler(blocks=100, slots=10, nextn=0)
    seq = add(s, "a", 20, max_tokens=3)
    turn(s)
    first, second = s.plan(1.0), s.plan(2.0)
    assert second is None or not second.rows or seq.output_len + 2 <= 3
    s.absorb(first, [StepOutput((1,), failed=True)])
    assert seq.finish_reason == "error"
    ends = s.settle(first)
    assert [one.seq.key for one in ends] == ["a"]
    assert s.pools.blocks.owned > 0, "the step that runs may still write"
    s.absorb(second, [None])
    assert s.settle(second) == []
    assert s.pools.blocks.owned == 0


def test_the_next_step_waits_for_tokens_and_not_for_counts():
    s = scheduler(blocks=100, slots=10, nextn=3)
    seq = add(s, "a", 20)
    turn(s)
    total, made = len(seq.tokens), s.counters["generated_tokens"]
    plan = s.plan(1.0)
    s.absorb(plan, made_up(plan, emit=3))
    assert (len(seq.tokens), seq.num_tokens) == (total + 3, total + 2)
    assert s.counters["generated_tokens"] == made
    assert (seq.ahead, seq.ahead_most) == (1, 4)
    (said,) = s.settle(plan)
    assert (said.index, said.tokens) == (total - 20, (1, 1, 1))
    assert s.counters["generated_tokens"] == made + 3
    assert s.counters["accepted_tokens"] == seq.accepted_tokens == 2
    assert (seq.ahead, seq.ahead_most) == (0, 0)


def test_nobody_is_preempted_under_a_step_that_runs():
    s = scheduler(blocks=4, nextn=0, decode_reserve_tokens=0, skip_ahead=0)
    a = add(s, "a", BLOCK)
    b = add(s, "b", BLOCK - 1)
    turn(s)
    now = 1.0
    while True:
        plan = s.plan(now)
        again = s.plan(now + 0.5)
        if again is None:
            break
        for one in (plan, again):
            s.absorb(one, made_up(one))
            s.settle(one)
        now += 1.0
    assert not s.counters["preemptions"]
    assert {a.phase, b.phase} == {Phase.RUNNING}
    s.absorb(plan, made_up(plan))
    s.settle(plan)
    assert s.plan(now) is not None
    assert s.counters["preemptions"] == 1


def test_a_fork_is_not_due_while_its_original_is_in_a_step():
    s = scheduler(blocks=100, slots=10)
    for i in range(2):
        add(s, f"r{i}", 20, seed=1)
    for seq in s.admit(0.0):
        s.ready(seq, NOTHING)
    plan = s.plan(0.0)
    assert s.fork().blocks == ()
    assert s.plan(0.5) is None
    s.absorb(plan, made_up(plan))
    s.settle(plan)
    assert len(s.fork().blocks) == 1


def test_greedy_requests_of_several_classes_all_end():
    loop, sink = hand_loop(toy(num_blocks=40, num_state_slots=8), max_num_seqs=3, age_s=5.0)
    for i in range(12):
        sampling = greedy(9, priority=i % 3 - 1)
        loop.submit(request(f"r{i}", prompt(i, 5 + i), sampling), f"r{i}", 0.0)
    run_dry(loop)
    for i in range(12):
        assert sink.tokens[f"r{i}"] == alone(prompt(i, 5 + i), greedy(9))


def test_a_decode_worker_ends_what_it_cannot_park():
    s = scheduler("decode", blocks=4, nextn=0, decode_reserve_tokens=0)
    for i in range(2):
        reservation = s.reserve(BLOCK)
        assert reservation is not None
        asked = request(f"r{i}", prompt(i, BLOCK), greedy(ignore_eos=True))
        seq = LiveSequence(asked, asked.request_id, 0.0)
        seq.tokens.append(1)
        s.start(seq, reservation)
    plan = s.plan(0.0)
    assert len(plan.rows) == 1, "of three blocks two are full"
    assert [one.finish for one in s.take_ended()] == ["insufficient_system_resource"]
    assert s.counters["recomputed"] == 0


def test_a_lonely_request_runs_in_the_next_step():
    s = scheduler()
    add(s, "a", 10)
    plan, _ = turn(s)
    assert [c.seq.key for c in plan.chunks] == ["a"]


def test_a_prompt_without_memory_does_not_stop_what_runs():
    s = scheduler(blocks=6, decode_reserve_tokens=0)
    add(s, "runs", 3 * BLOCK)
    turn(s)
    add(s, "waits", 4 * BLOCK)
    kinds = [kind(turn(s, float(n))[0]) for n in range(5)]
    assert kinds == ["decode"] * 5


def test_a_queue_of_aborted_requests_runs_nothing():
    s = scheduler(max_num_seqs=1)
    for i in range(5):
        add(s, f"r{i}", 10)
    for i in range(5):
        s.abort(f"r{i}")
    assert [one.finish for one in s.take_ended()] == ["abort"] * 5
    assert turn(s) == (None, [])
    assert s.unfinished == 0
