"""Targets of time change who is let in, what is drafted and what is read first; nobody starves."""

from __future__ import annotations

import pytest
from policy import BLOCK, add, made_up, scheduler

from deepinfer_engine.core.targets import FirstTokenTarget, StepTimes, TokenTarget
from deepinfer_engine.core.windows import NOTHING


def takes(positions, context):
    """Seconds of a step on the machine of these tests."""
    return 0.004 + 0.001 * positions + 1e-6 * context


def learned(target, *, nextn=0, accepted=0):
    """After steps of several sizes, in which so many of all drafts were accepted."""
    made = TokenTarget(target, nextn)
    for rows in (1, 2, 4, 6, 3, 5) * 8:
        context = 1000 * rows if rows % 2 else 400 * rows
        drafts = [(nextn, accepted)] * rows
        made.step(rows, context, drafts, takes(rows * (1 + nextn), context))
    return made


def test_what_a_step_takes_is_learned_from_steps_of_other_sizes():
    times = learned(1.0).times
    for rows, context in ((8, 8000), (16, 3000), (1, 20_000)):
        assert times.seconds(rows, context) == pytest.approx(takes(rows, context), rel=0.05)


def test_steps_that_were_all_alike_do_not_make_a_larger_one_free():
    times = StepTimes()
    for _ in range(50):
        times.saw(4, 4000, 0.010)
    assert times.seconds(4, 4000) == pytest.approx(0.010, rel=0.01)
    assert 0.012 < times.seconds(8, 8000) < 0.020


def test_one_step_that_was_disturbed_changes_little():
    times = learned(1.0).times
    before = times.seconds(4, 4000)
    times.saw(4, 4000, 60.0)
    assert times.seconds(4, 4000) < 2 * before


@pytest.mark.parametrize(("target", "most"), [(0.010, 4), (0.016, 9), (0.0, 1000)])
def test_as_many_run_as_leave_a_token_its_time(target, most):
    made = learned(target)
    assert made.room(1, 100, 1000) == (most if target else 1000)
    assert made.admits(0, 0, 10**9), "one alone always may"


@pytest.mark.parametrize(
    ("accepted", "rows", "target", "drafts"),
    [
        (0, 4, 0.010, 0),  # none is ever right: each is lost time
        (3, 4, 0.010, 3),  # all are right: four tokens a step
        (3, 1, 0.001, 3),  # late anyway: as soon as can be
        (0, 1, 1.0, 3),  # there is time for all
    ],
)
def test_as_many_drafts_as_a_token_has_time_for(accepted, rows, target, drafts):
    assert learned(target, nextn=3, accepted=accepted).drafts(rows, 400 * rows) == drafts


class Machine:
    """A scheduler whose steps take what `takes` says, on a clock of their own."""

    def __init__(self, role="both", *, per_prompt_token=1e-4, **config):
        self.s = scheduler(role, blocks=4000, slots=300, **{"nextn": 0, **config})
        self.now, self._prompt = 0.0, per_prompt_token
        self.steps = []
        self.first = {}

    def step(self, emit=1):
        s = self.s
        for seq in s.admit(self.now):
            s.ready(seq, NOTHING)
        plan = s.plan(self.now)
        if plan is None:
            return None
        rows = len(plan.rows)
        context = sum(len(seq.tokens) for seq, _ in plan.rows)
        positions = rows + sum(n for _, n in plan.rows)
        seconds = self._prompt * plan.prompt_tokens + (takes(positions, context) if rows else 0.004)
        self.steps.append((rows, positions, plan.prompt_tokens, seconds))
        self.now += seconds
        s.absorb(plan, made_up(plan, emit))
        for one in s.settle(plan):
            self.first.setdefault(one.seq.key, self.now)
        return plan

    def run(self, limit=20_000):
        for _ in range(limit):
            if self.step() is None and not self.s.unfinished:
                return
        raise AssertionError(f"{self.s.unfinished} are still there")


def most_at_once(target):
    machine = Machine(max_num_seqs=64, token_target_s=target)
    for i in range(40):
        add(machine.s, f"r{i}", 20 + i, max_tokens=120)
        for _ in range(3):
            machine.step()
    machine.run()
    assert len(machine.first) == 40, "everybody had its turn"
    return max(rows for rows, *_ in machine.steps)


def test_a_tighter_target_runs_fewer_beside_one_another_and_all_end():
    assert most_at_once(0.0) > 25
    assert most_at_once(0.020) in range(12, 19)  # 0.004 + 16 x 0.001
    assert most_at_once(0.010) in range(4, 9)  # 0.004 + 6 x 0.001
    assert most_at_once(0.001) <= 3, "none keeps it: one after the other, once that is known"


@pytest.mark.parametrize(("target", "least", "most"), [(0.0, 0.02, 1.0), (0.016, 0.010, 0.020)])
def test_a_step_that_reads_beside_others_keeps_within_the_target(target, least, most):
    machine = Machine(max_gap=8.0, max_num_batched_tokens=4096, token_target_s=target)
    for i in range(4):
        add(machine.s, f"r{i}", 10, max_tokens=1000)
    for _ in range(20):
        machine.step()
    add(machine.s, "long", 3000)
    machine.steps.clear()
    while "long" not in machine.first:
        machine.step()
    settled = [seconds for _, _, read, seconds in machine.steps if read][8:-1]
    assert settled
    assert least <= max(settled) <= most


def test_drafts_go_before_the_target_does():
    def drafted(target):
        machine = Machine(nextn=3, max_num_seqs=32, token_target_s=target, max_gap=0.0)
        for i in range(6):
            add(machine.s, f"r{i}", 10, max_tokens=300)
        machine.run()
        rows, positions, *_ = machine.steps[len(machine.steps) // 2]
        return positions / rows - 1

    assert drafted(0.0) == 3
    assert drafted(0.011) < 3, "none is right here, so they only cost time"


def test_memory_for_a_prompt_from_elsewhere_waits_while_tokens_would_be_late():
    machine = Machine("decode", max_num_seqs=64, token_target_s=0.0075)
    s = machine.s
    s.at.tokens = learned(0.0075)
    held = [s.reserve(10) for _ in range(2)]
    assert all(held)
    assert s.reserve(10) is not None, "0.004 + 3 x 0.001 is what a token may take"
    assert s.reserve(10) is None
    assert s.gauges()["token_room"] == 0
    s.cancel(held[0])
    assert s.reserve(10) is not None
    s.pools.audit()


def reads(target, **lengths):
    """In which order first tokens came, on a machine that reads 10,000 tokens a second."""
    machine = Machine("prefill", max_num_batched_tokens=16 * BLOCK, ttft_target_s=target)
    add(machine.s, "warm", 40 * BLOCK)
    while "warm" not in machine.first:
        machine.step()
    machine.s.release("warm")
    for name, length in lengths.items():
        add(machine.s, name, length, now=machine.now)
    while len(machine.first) < len(lengths) + 1:
        machine.step()
        for name in machine.first:
            machine.s.release(name)
    return sorted(lengths, key=machine.first.get), {
        name: machine.first[name] - machine.first["warm"] for name in lengths
    }


def test_a_prompt_that_can_be_in_time_goes_before_one_that_cannot():
    lengths = {"long": 100 * BLOCK, "middle": 12 * BLOCK}
    _, free = reads(0.0, **lengths)
    order, took = reads(0.045, **lengths)
    assert order == ["middle", "long"]
    assert took["middle"] < 0.045 < free["middle"]


def test_of_those_in_time_the_most_pressed_goes_first():
    """Shortest first would make it late."""
    lengths = {"long": 60 * BLOCK, **{f"s{i}": 6 * BLOCK for i in range(9)}}
    _, free = reads(0.0, **lengths)
    _, took = reads(0.25, **lengths)
    assert max(took.values()) < 0.25
    assert took["long"] < free["long"]


def test_one_that_is_late_is_read_beside_a_stream_of_those_in_time():
    machine = Machine("prefill", max_num_batched_tokens=16 * BLOCK, ttft_target_s=0.05, age_s=0.0)
    add(machine.s, "warm", 20 * BLOCK)
    while "warm" not in machine.first:
        machine.step()
    late = add(machine.s, "late", 80 * BLOCK, now=machine.now)
    for i in range(60):
        add(machine.s, f"r{i}", 15 * BLOCK, now=machine.now)
        machine.step()
        for name in list(machine.first):
            machine.s.release(name)
        if "late" in machine.first:
            break
    assert late.key in machine.first, "a quarter of each step is its own"


def test_without_steps_seen_nothing_is_late_and_nothing_is_held_back():
    assert TokenTarget(0.001, 3).admits(50, 10_000, 100)
    assert TokenTarget(0.001, 3).drafts(50, 10_000) == 3
    assert FirstTokenTarget(0.1).slack(5.0, 10**6, 5.0) == pytest.approx(0.1)
