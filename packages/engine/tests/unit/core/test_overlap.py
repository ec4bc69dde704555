"""The loop that plans while a step runs: what it hides, and that nothing else changes."""

from __future__ import annotations

import threading
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy import NoParking, made_up
from toy_engine import (
    BLOCK,
    PATIENCE_S,
    TOY,
    alone,
    ask,
    gated,
    greedy,
    hand_loop,
    prompt,
    request,
    run,
    run_dry,
    toy,
)

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import Caps
from deepinfer_engine.core.scheduler import Scheduler
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.core.windows import NOTHING
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.router.local import LocalEngine


def submit(loop, name, tokens, sampling=None, now=0.0):
    loop.submit(request(name, tokens, sampling), name, now)


def test_the_next_step_is_planned_while_the_device_is_busy():
    runner = gated()
    loop, sink = hand_loop(runner, overlap=True)
    submit(loop, "a", prompt(1, 20), greedy(30, ignore_eos=True))
    runner.gate.clear()
    first = loop.step(0.0)
    assert first.chunks
    assert runner.entered.wait(PATIENCE_S)
    flown = loop._flights
    stepping = threading.Thread(target=loop.step, args=(1.0,))
    stepping.start()
    while flown.empty():  # planned and launched although the first one stands still
        stepping.join(0.001)
    assert loop.scheduler.at.in_flight == 2
    assert sink.tokens == {}
    runner.gate.set()
    stepping.join(PATIENCE_S)
    run_dry(loop)
    loop.close()
    assert sink.tokens["a"] == alone(prompt(1, 20), greedy(30, ignore_eos=True))


def test_nobody_is_woken_for_the_end_of_a_step_before_the_next_one_is_on_the_device():
    runner = gated()
    loop, _ = hand_loop(runner, overlap=True)
    submit(loop, "a", prompt(1, 20), greedy(30, ignore_eos=True))
    woken = []
    correct = loop._corrected

    def seen(flight, before):
        woken.append(before is not None and before.over.is_set())
        return correct(flight, before)

    loop._corrected = seen
    runner.gate.clear()
    loop.step(0.0)
    stepping = threading.Thread(target=loop.step, args=(1.0,))
    stepping.start()
    while loop._flights.empty():
        stepping.join(0.001)
    runner.gate.set()
    stepping.join(PATIENCE_S)
    run_dry(loop)
    loop.close()
    assert woken[:2] == [False, False]


def test_never_are_more_than_two_steps_on_their_way():
    loop, _ = hand_loop(overlap=True)
    most = 0
    for i in range(4):
        submit(loop, f"r{i}", prompt(i, 20), greedy(20, ignore_eos=True))
    for n in range(200):
        most = max(most, loop.scheduler.at.in_flight)
        if loop.step(float(n)) is None:
            break
    loop.close()
    assert most == 1, "between two calls one step runs"


def test_the_last_tokens_come_without_another_request():
    loop, sink = hand_loop(overlap=True)
    submit(loop, "a", prompt(1, 9), greedy(5, ignore_eos=True))
    while loop.unfinished:
        assert loop.step(0.0) is not None
    assert loop.step(0.0) is None
    loop.close()
    assert sink.tokens["a"] == alone(prompt(1, 9), greedy(5, ignore_eos=True))


def test_a_runner_that_fails_ends_the_loop_with_its_error():
    class Breaks(ToyRunner):
        def decode(self, rows):
            raise ValueError("out of order")

    loop, _ = hand_loop(Breaks(**TOY), overlap=True)
    submit(loop, "a", prompt(1, 9))
    with pytest.raises(ValueError, match="out of order"):
        run_dry(loop)
    loop.abort_all("error")
    loop.close()
    loop.audit()
    assert loop.unfinished == 0


class Watched(ToyRunner):
    """Whatever is planned on a guess: the device is given no row of a sequence that has ended, and
    no more drafts than there is room for."""

    rows, cut = 0, 0

    def decode(self, rows):
        for row in rows:
            said = len(row.history) - row.prompt_len
            assert row.history[-1] not in self.caps.eos_token_ids
            assert said + row.max_draft + 1 <= row.sampling.max_tokens
            self.rows += 1
            self.cut += row.max_draft < self.caps.nextn
        return super().decode(rows)


def test_the_device_runs_nothing_that_commit_would_drop():
    # So small a vocabulary that answers end by themselves.
    runner = Watched(**{**TOY, "vocab_size": 24})
    loop, sink = hand_loop(runner, overlap=True)
    for i in range(60):
        submit(loop, f"r{i}", prompt(i, 9, 23), greedy(3 + i % 17))
    run_dry(loop)
    loop.close()
    reasons = {end.finish for ends in sink.ends.values() for end in ends}
    assert reasons == {"stop", "length"}
    assert 0 < runner.cut < runner.rows


@pytest.mark.parametrize("aborted_at", [1, 2, 5])
def test_an_abort_is_heard_while_a_step_runs(aborted_at):
    loop, sink = hand_loop(overlap=True)
    submit(loop, "a", prompt(1, 20), greedy(30, ignore_eos=True))
    submit(loop, "b", prompt(2, 20), greedy(30, ignore_eos=True))
    for n in range(aborted_at):
        loop.step(float(n))
    loop.abort("a")
    run_dry(loop)
    loop.close()
    loop.audit()
    assert sink.ends["a"][0].finish == "abort"
    assert sink.tokens["b"] == alone(prompt(2, 20), greedy(30, ignore_eos=True))


def test_the_step_thread_builds_no_step_of_a_sequence_that_surely_ends():
    loop, sink = hand_loop(toy(nextn=0), overlap=True)
    submit(loop, "a", prompt(1, 9), greedy(6, ignore_eos=True))
    run_dry(loop)
    loop.close()
    assert len(sink.tokens["a"]) == 6
    assert loop.scheduler.counters["decode_steps"] == 5


@pytest.mark.parametrize("window", [12, 0], ids=["state", "stateless"])
def test_what_is_published_between_steps_is_exact(window):
    """States at the borders of an answer are copied before the next step moves the slot on."""

    async def body():
        shape = {"window": window, "num_state_slots": 16 if window else 1}
        runner = toy(**shape)
        store = MemoryStore(runner.layout)
        engine = LocalEngine(
            runner, store=store, config=EngineConfig(overlap=True, persist_state="all")
        )
        tokens, sampling = prompt(5, 3 * BLOCK + 2), greedy(60, ignore_eos=True)
        first = await ask(engine, request("one", tokens, sampling))
        assert first.tokens == alone(tokens, sampling, window=window)
        for cut in (10, 25, 47):
            longer = (*tokens, *first.tokens[:cut])
            more = await ask(engine, request(f"at{cut}", longer, sampling))
            assert more.cached >= (len(longer) - 1) // BLOCK * BLOCK - BLOCK
            assert more.tokens == alone(longer, sampling, window=window)
        await engine.close()

    run(body())


def test_a_wave_with_a_common_beginning_reads_it_once():
    async def body():
        import asyncio

        runner = toy()
        engine = LocalEngine(
            runner, store=MemoryStore(runner.layout), config=EngineConfig(overlap=True)
        )
        common = prompt(7, 6 * BLOCK)
        asked = [(*common, i, 3) for i in range(4)]
        answers = await asyncio.gather(
            *(ask(engine, request(f"r{i}", p, greedy(9))) for i, p in enumerate(asked))
        )
        for tokens, answer in zip(asked, answers, strict=True):
            assert answer.tokens == alone(tokens, greedy(9))
        (status,) = await engine.status()
        await engine.close()
        assert status.counters["prefill_tokens"] <= 6 * BLOCK + 4 * (BLOCK + 2)

    run(body())


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_accounts_of_steps_in_flight(data):
    """Growth by at most one block a step, room for whatever is committed, counts back at 0."""
    draw = data.draw
    random = Random(draw(st.integers(0, 1 << 32)))
    nextn = draw(st.integers(0, 7))
    size = draw(st.sampled_from([16, 32, 128, 256]))
    caps = Caps(256, 4096, nextn, 2, (255,), draw(st.integers(12, 60)), 12)
    config = EngineConfig(
        max_num_seqs=draw(st.integers(1, 6)), max_num_batched_tokens=4 * size, age_s=0.0
    )
    s = Scheduler(caps, size, config, "both", NoParking(), keep_snapshots=False)
    depth = draw(st.integers(1, 2))
    flying = []
    for n in range(draw(st.integers(10, 60))):
        if random.random() < 0.3 and len(s.at.by_key) < 8:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=random.randint(1, 60), stop_token_ids=(7,)
            )
            asked = request(f"r{n}", prompt(n, random.randint(1, 3 * size)), sampling)
            s.add(LiveSequence(asked, asked.request_id, float(n)))
        if s.at.by_key and random.random() < 0.05:
            s.abort(random.choice(list(s.at.by_key)))
        for seq in s.admit(float(n)):
            s.ready(seq, NOTHING)
        s.fork()
        before = {key: len(seq.blocks) for key, seq in s.at.by_key.items()}
        plan = s.plan(float(n))
        if plan is not None:
            for seq, drafts in plan.rows:
                most = len(seq.tokens) + seq.ahead_most
                assert len(seq.blocks) * size >= most - 1, "every position that may be written"
                assert drafts <= nextn
                grown = len(seq.blocks) - before.get(seq.key, 0)
                assert grown <= 1 or seq.key not in before or before[seq.key] == 0
            flying.append(plan)
        while flying and (len(flying) >= depth or plan is None):
            done = flying.pop(0)
            outputs = made_up(done, emit=random.randint(1, nextn + 1))
            ended = [seq.finish_reason is not None or seq.aborting for seq, _ in done.rows]
            k = len(done.chunks)
            outputs[k:] = [
                None if over else one for over, one in zip(ended, outputs[k:], strict=True)
            ]
            s.absorb(done, outputs)
            for seq, _ in done.rows:
                if seq.finish_reason is None and not seq.aborting:
                    assert seq.num_tokens == len(seq.tokens) - 1
            s.settle(done)
            s.take_ended()
            s.pools.audit()
    for done in flying:
        s.absorb(done, [*made_up(done)[: len(done.chunks)], *([None] * len(done.rows))]) if all(
            seq.finish_reason is not None or seq.aborting for seq, _ in done.rows
        ) else s.absorb(done, made_up(done))
        s.settle(done)
    for seq in s.at.by_key.values():
        assert (seq.ahead, seq.ahead_most, seq.users) == (0, 0, 0)
    for key in list(s.at.by_key):
        s.abort(key)
    s.pools.audit()
    assert s.pools.blocks.owned == s.pools.states.owned == 0
