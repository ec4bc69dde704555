"""The loop on the toy runner: equal tokens whatever is batched, drafted, chunked, preempted."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import BLOCK, TOY, alone, greedy, hand_loop, prompt, request, run_dry, toy

from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.errors import CapacityError, EngineUnavailable, PromptTooLong, RequestError


def submit(loop, name, tokens, sampling=None, now=0.0):
    loop.submit(request(name, tokens, sampling), name, now)


def test_a_batch_says_what_each_request_says_alone():
    loop, sink = hand_loop(max_num_batched_tokens=32)
    prompts = {f"r{i}": prompt(i, 1 + 7 * i) for i in range(12)}
    for name, tokens in prompts.items():
        submit(loop, name, tokens)
    run_dry(loop)
    for name, tokens in prompts.items():
        assert sink.tokens[name] == alone(tokens, greedy())


def test_drafts_save_steps_and_change_nothing():
    tokens, sampling = prompt(1, 30), greedy(40, ignore_eos=True)
    steps = {}
    for nextn in (0, 1, 3, 5):
        loop, sink = hand_loop(toy(nextn=nextn))
        submit(loop, "r", tokens, sampling)
        steps[nextn] = run_dry(loop)
        assert sink.tokens["r"] == alone(tokens, sampling)
    assert steps[5] < steps[3] < steps[1] < steps[0]


def test_requests_join_between_the_steps_of_others():
    loop, sink = hand_loop()
    submit(loop, "early", prompt(1, 20), greedy(50, ignore_eos=True))
    for n in range(8):
        loop.step(float(n))
    submit(loop, "late", prompt(2, 20), greedy(2, ignore_eos=True), now=8.0)
    run_dry(loop)
    assert list(sink.ends) == ["late", "early"]
    assert sink.tokens["late"] == alone(prompt(2, 20), greedy(2, ignore_eos=True))


def test_one_prefill_step_takes_chunks_of_several_prompts():
    loop, _ = hand_loop(max_num_batched_tokens=40)
    for i in range(3):
        submit(loop, f"r{i}", prompt(i, 12))
    plan = loop.step(0.0)
    assert [(c.seq.key, c.start, c.end) for c in plan.chunks] == [
        ("r0", 0, 12),
        ("r1", 0, 12),
        ("r2", 0, 12),
    ]


@pytest.mark.parametrize("window", [12, 0], ids=["state", "stateless"])
def test_a_preempted_sequence_is_parked_and_goes_on_as_if_nothing_happened(window):
    runner = toy(num_blocks=14, num_state_slots=6 if window else 1, window=window)
    loop, sink = hand_loop(runner, decode_reserve_tokens=0)
    sampling = greedy(50, ignore_eos=True)
    for i in range(3):
        submit(loop, f"r{i}", prompt(i, 17), sampling)
    run_dry(loop)
    assert loop.scheduler.counters["parked"] > 0
    for i in range(3):
        assert sink.tokens[f"r{i}"] == alone(prompt(i, 17), sampling, window=window)


def test_a_model_without_a_state_runs_more_sequences_than_it_has_slots():
    loop, sink = hand_loop(toy(num_state_slots=1, window=0))
    for i in range(5):
        submit(loop, f"r{i}", prompt(i, 17), greedy(9))
    assert loop.snapshot()[1]["state_slots_capacity"] == 0
    run_dry(loop)
    assert [sink.tokens[f"r{i}"] for i in range(5)] == [
        alone(prompt(i, 17), greedy(9), window=0) for i in range(5)
    ]
    loop.audit()


@pytest.mark.parametrize("window", [12, 0], ids=["state", "stateless"])
def test_what_cannot_be_parked_is_computed_again_and_says_the_same(window):
    loop, sink = hand_loop(
        toy(num_blocks=14, num_state_slots=6, window=window), decode_reserve_tokens=0, park_bytes=0
    )
    for i in range(3):
        submit(loop, f"r{i}", prompt(i, 17), greedy(50, ignore_eos=True))
    run_dry(loop)
    assert loop.scheduler.counters["recomputed"] > 0
    for name, end in sink.ends.items():
        assert end[0].finish == "length"
        usage = end[0].seq.usage()
        assert (usage.prompt_tokens, usage.completion_tokens) == (17, 50)
        assert sink.tokens[name] == alone(
            prompt(int(name[1]), 17), greedy(50, ignore_eos=True), window=window
        )


def test_a_sequence_that_outgrows_the_whole_pool_ends_instead_of_waiting_forever():
    loop, sink = hand_loop(toy(num_blocks=5))
    submit(loop, "r", prompt(1, 20), greedy(100, ignore_eos=True))
    run_dry(loop)
    assert sink.ends["r"][0].finish == "insufficient_system_resource"
    assert len(sink.tokens["r"]) == 4 * BLOCK - 20 + 1


@pytest.mark.parametrize("max_gap", [0.0, 3.0], ids=["in turn", "mixed"])
def test_a_long_prompt_does_not_stop_running_sequences(max_gap):
    loop, sink = hand_loop(max_num_batched_tokens=BLOCK, prefill_every_steps=2, max_gap=max_gap)
    submit(loop, "short", prompt(1, 5), greedy(30, ignore_eos=True))
    loop.step(0.0)
    submit(loop, "long", prompt(2, 40 * BLOCK), greedy(1), now=0.0)
    run_dry(loop)
    assert list(sink.ends) == ["short", "long"]


@pytest.mark.parametrize(
    ("length", "error"), [(0, RequestError), (64, PromptTooLong), (40, CapacityError)]
)
def test_a_prompt_that_can_never_run_is_refused_at_once(length, error):
    loop, _ = hand_loop(toy(num_blocks=6, max_model_len=64))
    with pytest.raises(error):
        submit(loop, "r", prompt(1, length))
    assert loop.unfinished == 0


@pytest.mark.parametrize("wrong", [-1, 257, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused_before_it_reaches_the_runner(wrong):
    loop, sink = hand_loop()
    with pytest.raises(RequestError, match="token ids are 0"):
        submit(loop, "bad", [1, wrong, 2])
    submit(loop, "good", [1, 256, 2])
    run_dry(loop)
    assert sink.tokens["good"] == alone([1, 256, 2], greedy())


def test_a_row_without_a_possible_token_ends_with_an_error_and_the_others_go_on():
    class Dead(ToyRunner):
        def decode(self, rows):
            outputs = super().decode(rows)
            return [
                dataclasses.replace(o, tokens=(), failed=True) if r.prompt_len == 9 else o
                for r, o in zip(rows, outputs, strict=True)
            ]

    loop, sink = hand_loop(Dead(**TOY))
    submit(loop, "dies", prompt(1, 9))
    submit(loop, "lives", prompt(2, 10))
    run_dry(loop)
    assert sink.ends["dies"][0].finish == "error"
    assert len(sink.tokens["dies"]) == 1
    assert sink.tokens["lives"] == alone(prompt(2, 10), greedy())


def test_the_longest_prompt_that_fits_runs():
    loop, sink = hand_loop(toy(num_blocks=6, max_model_len=64))
    submit(loop, "r", prompt(1, 5 * BLOCK - 1), greedy(1))
    run_dry(loop)
    assert len(sink.tokens["r"]) == 1


def test_a_full_queue_refuses_with_a_time_to_retry():
    loop, _ = hand_loop(max_queue=1)
    submit(loop, "a", prompt(1, 4))
    with pytest.raises(EngineUnavailable) as refused:
        submit(loop, "b", prompt(1, 4))
    assert refused.value.retry_after_s > 0


def test_an_id_that_runs_already_is_refused():
    loop, sink = hand_loop()
    submit(loop, "a", prompt(1, 4))
    with pytest.raises(RequestError, match="own id"):
        submit(loop, "a", prompt(1, 4))
    run_dry(loop)
    assert len(sink.ends) == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_aborts_stops_and_preemptions_leak_nothing_and_change_no_token(data):
    draw = data.draw
    runner = toy(num_blocks=draw(st.integers(9, 40)), num_state_slots=draw(st.integers(2, 9)))
    loop, sink = hand_loop(
        runner,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 5)) * BLOCK,
        decode_reserve_tokens=draw(st.sampled_from([0, 8, 32])),
        park_bytes=draw(st.sampled_from([0, 2000, 1 << 20])),
        skip_ahead=draw(st.integers(0, 3)),
        prefill_every_steps=draw(st.integers(0, 3)),
        max_gap=draw(st.sampled_from([0.0, 3.0])),
    )
    asked, now = {}, 0.0
    for i in range(draw(st.integers(1, 7))):
        sampling = greedy(
            draw(st.integers(1, 25)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.lists(st.integers(0, 250), max_size=3))),
        )
        tokens = prompt(draw(st.integers(0, 3)), draw(st.integers(1, 60)))
        name = f"r{i}"
        asked[name] = (tokens, sampling)
        submit(loop, name, tokens, sampling, now)
        for _ in range(draw(st.integers(0, 6))):
            loop.step(now)
            now += 1.0
            loop.audit()
        if draw(st.integers(0, 3)) == 0:
            loop.abort(f"r{draw(st.integers(0, i))}")
    run_dry(loop)
    loop.audit()
    gauges = loop.scheduler.gauges()
    assert gauges["blocks_owned"] == 0
    assert gauges["state_slots_free"] == gauges["state_slots_capacity"]
    assert set(sink.ends) == set(asked)
    for name, (tokens, sampling) in asked.items():
        whole, said = alone(tokens, sampling), sink.tokens[name]
        if sink.ends[name][0].finish in ("stop", "length"):
            assert said == whole
        else:
            assert said == whole[: len(said)]
