"""Constrained sequences: every token allowed, whatever is drafted, parked, aborted or moved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import BLOCK, TOY, alone, greedy, hand_loop, prompt, request, run_dry, toy
from toy_grammar import DIES, EOS, TENS, WORDS, ToyGrammar, obeys

from deepinfer_engine.core.constraint import ConstraintState
from deepinfer_engine.core.masks import mask_rows
from deepinfer_engine.core.sampling_params import validate
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.errors import RequestError


def submit(loop, name, tokens, sampling, grammar=None, now=0.0):
    state = None if grammar is None else ConstraintState(grammar, "")
    loop.submit(request(name, tokens, sampling), name, now, state)


def bits(row):
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:257]).tolist())


def test_the_output_obeys_with_and_without_drafts_and_is_the_same():
    said = {}
    for nextn in (0, 1, 3, 5):
        loop, sink = hand_loop(toy(nextn=nextn))
        submit(loop, "r", prompt(1, 30), greedy(40, constraint=TENS), ToyGrammar("tens"))
        submit(loop, "free", prompt(2, 30), greedy(40))
        run_dry(loop)
        said[nextn] = sink.tokens["r"]
        assert obeys("tens", said[nextn])
        assert sink.tokens["free"] == alone(prompt(2, 30), greedy(40))
    assert said[0] == said[1] == said[3] == said[5]
    assert said[0] != alone(prompt(1, 30), greedy(40))


def test_a_grammar_that_ends_in_nothing_ends_its_request_alone():
    loop, sink = hand_loop()
    submit(loop, "dies", prompt(1, 9), greedy(constraint=DIES), ToyGrammar("dies"))
    submit(loop, "lives", prompt(2, 10), greedy())
    run_dry(loop)
    assert sink.ends["dies"][0].finish == "error"
    assert len(sink.tokens["dies"]) == 3
    assert sink.tokens["lives"] == alone(prompt(2, 10), greedy())


def test_a_token_that_the_grammar_never_allowed_ends_its_request_alone():
    class Careless(ToyRunner):
        def prefill(self, chunks):
            return [
                o if o is None or c.constraint is None else type(o)((200,))
                for o, c in zip(super().prefill(chunks), chunks, strict=True)
            ]

    loop, sink = hand_loop(Careless(**TOY))
    submit(loop, "fault", prompt(1, 9), greedy(constraint=TENS), ToyGrammar("tens"))
    submit(loop, "lives", prompt(2, 10), greedy())
    run_dry(loop)
    assert sink.ends["fault"][0].finish == "error"
    assert sink.tokens["fault"] == [200]
    assert sink.tokens["lives"] == alone(prompt(2, 10), greedy())


def test_a_parked_sequence_gives_its_walk_back_and_walks_again_from_the_start():
    grammars = [ToyGrammar("endless") for _ in range(3)]

    def run(runner):
        loop, sink = hand_loop(runner, decode_reserve_tokens=0)
        for i, grammar in enumerate(grammars):
            grammar.log.clear()
            submit(loop, f"r{i}", prompt(i, 17), greedy(50, constraint=TENS), grammar)
        run_dry(loop)
        return loop, sink

    _, calm = run(toy())
    assert [len(g.log) for g in grammars] == [1, 1, 1]
    loop, sink = run(toy(num_blocks=14, num_state_slots=6))
    assert loop.scheduler.counters["parked"] > 0
    assert sum(len(g.log) for g in grammars) > 3
    assert sink.tokens == calm.tokens


def test_the_walk_over_drafts_stops_at_the_first_that_is_not_allowed_and_goes_back():
    state = ConstraintState(ToyGrammar("tens"), "")
    state.catch_up([9, 9, 5], 2)
    rows = np.full((4, WORDS), -1, dtype=np.int32)
    state.fill(rows, [7, 100, 8])
    assert bits(rows[0]) == set(range(5, 16))
    assert bits(rows[1]) == set(range(7, 18))
    assert (rows[2:] == -1).all()
    again = np.full((4, WORDS), -1, dtype=np.int32)
    state.fill(again, [7, 100, 8])
    assert (again == rows).all()


def test_behind_its_end_everything_is_allowed():
    state = ConstraintState(ToyGrammar("tens"), "")
    output = [1, 2, 3, 4, 5]
    state.catch_up(output, 0)
    rows = np.full((3, WORDS), -1, dtype=np.int32)
    state.fill(rows, [EOS, 77])
    assert EOS in bits(rows[0])
    assert (rows[1:] == -1).all()


def test_mask_rows_stand_where_the_logits_of_their_request_are():
    one, two = (ConstraintState(ToyGrammar("tens"), "") for _ in range(2))
    two.catch_up([10], 0)
    drafts = np.array([[1, 2, 0], [0, 0, 0], [15, 250, 0]])
    rows = mask_rows([one, None, two], drafts, np.array([2, 3, 2]))
    assert rows.shape == (3 + 4 + 3, WORDS)
    assert bits(rows[0]) == set(range(11))
    assert bits(rows[2]) == set(range(2, 13))
    assert (rows[3:7] == -1).all()
    assert bits(rows[7]) == set(range(10, 21))
    assert bits(rows[8]) == set(range(15, 26))
    assert (rows[9] == -1).all()


def test_a_step_without_constraints_makes_no_mask():
    assert mask_rows([None, None], np.zeros((2, 3), dtype=np.int64), np.array([3, 3])) is None


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_what_contradicts_a_constraint_is_refused_by_name(field):
    with pytest.raises(RequestError, match=next(iter(field))):
        validate(greedy(constraint=TENS, **field), 257)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_aborts_and_preemptions_change_no_constrained_token(data):
    draw = data.draw
    runner = toy(num_blocks=draw(st.integers(9, 40)), num_state_slots=draw(st.integers(2, 9)))
    loop, sink = hand_loop(
        runner,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 5)) * BLOCK,
        decode_reserve_tokens=draw(st.sampled_from([0, 8])),
        park_bytes=draw(st.sampled_from([0, 2000, 1 << 20])),
    )
    asked, now = {}, 0.0
    for i in range(draw(st.integers(1, 6))):
        limit = draw(st.integers(1, 25))
        tokens = prompt(draw(st.integers(0, 3)), draw(st.integers(1, 40)))
        grammar = draw(st.sampled_from(["tens", None]))
        sampling = greedy(limit, constraint=TENS if grammar else None)
        asked[f"r{i}"] = (tokens, sampling, grammar)
        submit(loop, f"r{i}", tokens, sampling, grammar and ToyGrammar(grammar), now)
        for _ in range(draw(st.integers(0, 6))):
            loop.step(now)
            now += 1.0
            loop.audit()
        if draw(st.integers(0, 3)) == 0:
            loop.abort(f"r{draw(st.integers(0, i))}")
    run_dry(loop)
    for name, (tokens, sampling, grammar) in asked.items():
        calm, calm_sink = hand_loop(toy(nextn=0))
        submit(calm, "r", tokens, sampling, grammar and ToyGrammar(grammar))
        run_dry(calm)
        whole, said = calm_sink.tokens["r"], sink.tokens[name]
        assert said == whole[: len(said)]
        if sink.ends[name][0].finish in ("stop", "length"):
            assert said == whole
        if grammar:
            assert obeys(grammar, said)
