"""Verification of ragged batches: shapes, stops, masks, logprobs, dead rows, numpy and torch."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_dspark import (
    CounterRng,
    Penalties,
    Proposal,
    RaggedIds,
    SamplingBatch,
    ShapeError,
    SparseQ,
    Verifier,
)
from deepinfer_dspark.reference import LawSpec, law_of, verify_one


def random_batch(seed: int, R: int, gamma: int, vocab: int):
    rng = np.random.default_rng(seed)
    lens = rng.integers(0, gamma + 1, R)
    cu = np.concatenate([[0], np.cumsum(lens + 1)])
    logits = rng.normal(size=(int(cu[-1]), vocab)) * 2
    q = rng.gamma(0.7, size=(R, gamma, vocab)) + 1e-9
    q /= q.sum(-1, keepdims=True)
    drafts = rng.integers(0, vocab, (R, gamma))
    params = SamplingBatch(
        temperature=rng.choice([0.0, 0.5, 1.3], R),
        seeds=rng.integers(0, 2**60, R).astype(np.uint64),
        positions=rng.integers(0, 1000, R),
        top_p=rng.choice([1.0, 0.8], R),
        top_k=rng.choice([0, 3], R),
        min_p=rng.choice([0.0, 0.1], R),
    )
    return logits, cu, Proposal(drafts, np.full(R, gamma), q=q), lens, params


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(0, 4), st.integers(2, 9))
@settings(max_examples=80, deadline=None)
def test_every_request_gets_what_the_plain_twin_gives_it(seed, R, gamma, vocab) -> None:
    logits, cu, proposal, lens, params = random_batch(seed, R, gamma, vocab)
    result = Verifier().verify(logits, cu, proposal, lens, params)
    rng = CounterRng()
    for r in range(R):
        spec = LawSpec(
            temperature=float(params.temperature[r]),
            top_p=float(params.top_p[r]),
            top_k=int(params.top_k[r]),
            min_p=float(params.min_p[r]),
        )
        length, at = int(lens[r]), int(params.positions[r])
        p = [law_of(logits[cu[r] + j].tolist(), spec) for j in range(length + 1)]
        q = proposal.q[r, :length].tolist()
        drafts = proposal.tokens[r, :length].tolist()
        seed_r = params.seeds[r]
        accept = [float(rng("accept", seed_r, at + k)) for k in range(length)]
        run = result.n_accepted[r]
        purpose = "sample" if length == 0 else ("bonus" if run == length else "residual")
        final = float(rng(purpose, seed_r, at + run))
        assert result.emitted(r) == verify_one(p, q, drafts, accept, final)


def test_numpy_and_torch_agree_token_for_token() -> None:
    torch = pytest.importorskip("torch")
    logits, cu, proposal, lens, params = random_batch(5, 40, 4, 33)
    params = replace(params, coupled=np.arange(40) % 3 == 0)
    masks = np.random.default_rng(0).random(logits.shape) < 0.8
    a = Verifier().verify(logits, cu, proposal, lens, params, masks, logprobs=3)
    as_torch = replace(proposal, q=torch.from_numpy(proposal.q))
    b = Verifier().verify(
        torch.from_numpy(logits), cu, as_torch, lens, params, torch.from_numpy(masks), logprobs=3
    )
    assert np.array_equal(a.tokens, b.tokens)
    assert np.allclose(a.accept_prob, b.accept_prob, equal_nan=True)
    assert np.allclose(a.logprobs, b.logprobs)
    assert np.array_equal(a.top_ids, b.top_ids)


def test_results_do_not_depend_on_the_order_or_company_of_requests() -> None:
    logits, cu, proposal, lens, params = random_batch(9, 12, 3, 8)
    whole = Verifier().verify(logits, cu, proposal, lens, params)
    for r in (7, 2):
        one = np.array([r])
        alone = Verifier().verify(
            logits[cu[r] : cu[r + 1]],
            np.array([0, lens[r] + 1]),
            Proposal(proposal.tokens[one], proposal.lengths[one], q=proposal.q[one]),
            lens[one],
            params.select(one),
        )
        assert alone.emitted(0) == whole.emitted(r)
        assert whole.select(one).emitted(0) == whole.emitted(r)


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_round_without_drafts_is_the_same_beside_one_that_has_some(coupled, as_torch) -> None:
    """It goes a shorter way; every field of the outcome is that of the general one."""
    R, vocab = 24, 7
    logits, _, proposal, _, params = random_batch(11, R + 1, 3, vocab)
    lens = np.zeros(R + 1, dtype=np.int64)
    lens[R] = 2
    cu = np.concatenate([[0], np.cumsum(lens + 1)])
    logits = np.random.default_rng(2).normal(size=(int(cu[-1]), vocab))
    logits[3] = -np.inf
    logits[4, 2] = np.nan
    params = replace(
        params,
        coupled=np.full(R + 1, coupled),
        eos_ids=(1,),
        ignore_eos=np.arange(R + 1) % 2 == 0,
        stop_ids=RaggedIds.of([[i % vocab] for i in range(R + 1)]),
        max_new=np.arange(R + 1) % 3 + 1,
    )
    given = logits
    if as_torch:
        given = pytest.importorskip("torch").from_numpy(logits)
    few = np.arange(R)
    both = Verifier().verify(given, cu, proposal, lens, params, logprobs=2).select(few)
    short = Proposal(proposal.tokens[:R], proposal.lengths[:R], q=proposal.q[:R])
    alone = Verifier().verify(
        given[:R], cu[: R + 1], short, lens[:R], params.select(few), logprobs=2
    )
    assert both.dead.sum() == 2
    assert both.stopped.any()
    assert both.exhausted.any()
    for field in fields(alone):
        np.testing.assert_array_equal(getattr(alone, field.name), getattr(both, field.name))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    for draft, emitted in ((1, [1, 0]), (2, [1])):
        proposal = Proposal(np.array([[draft]]), np.array([1]))
        out = Verifier().verify(
            logits, np.array([0, 2]), proposal, np.array([1]), SamplingBatch.greedy(1)
        )
        assert out.emitted(0) == emitted


def test_bit_words_and_bools_are_the_same_mask() -> None:
    rng = np.random.default_rng(1)
    logits, allowed = rng.normal(size=(6, 70)), rng.random((6, 70)) < 0.3
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, 26))), axis=1, bitorder="little")
    words = packed.view(np.int32)
    params = SamplingBatch.uniform(6)
    cu, lens, none = np.arange(7), np.zeros(6, dtype=int), Proposal.empty(6)
    a = Verifier().verify(logits, cu, none, lens, params, allowed)
    b = Verifier().verify(logits, cu, none, lens, params, words)
    assert np.array_equal(a.tokens, b.tokens)
    assert allowed[np.arange(6), a.tokens].all()


def test_a_row_without_any_token_ends_only_its_own_request() -> None:
    logits = np.zeros((4, 5))
    logits[1] = -np.inf
    logits[2, 3] = np.nan
    params = replace(SamplingBatch.uniform(4), temperature=np.array([1.0, 1.0, 1.0, 0.0]))
    out = Verifier().verify(logits, np.arange(5), Proposal.empty(4), np.zeros(4, dtype=int), params)
    assert out.dead.tolist() == [False, True, True, False]
    assert [len(out.emitted(r)) for r in range(4)] == [1, 0, 0, 1]
    assert out.final[1] == out.final[2] == -1


def test_max_new_cuts_the_accepted_run_and_what_was_cut_is_not_counted() -> None:
    logits = np.full((4, 6), -9.0)
    logits[np.arange(4), [1, 2, 3, 4]] = 9.0
    proposal = Proposal(np.array([[1, 2, 3]]), np.array([3]))
    for limit, kept in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 4])):
        params = replace(SamplingBatch.greedy(1), max_new=np.array([limit]))
        out = Verifier().verify(logits, np.array([0, 4]), proposal, np.array([3]), params)
        assert out.emitted(0) == kept
        assert out.exhausted.tolist() == [True]
        assert out.keep[0] == min(limit, 3) + 1
        assert out.judged[0] == min(limit, 3)


def test_stop_ids_belong_to_their_request_and_eos_can_be_ignored() -> None:
    logits = np.full((3, 4), -9.0)
    logits[:, 2] = 9.0
    params = replace(
        SamplingBatch.greedy(3),
        stop_ids=RaggedIds.of([[2], [], [1]]),
        eos_ids=(2,),
        ignore_eos=np.array([True, True, False]),
    )
    out = Verifier().verify(logits, np.arange(4), Proposal.empty(3), np.zeros(3, dtype=int), params)
    assert out.stopped.tolist() == [True, False, True]


def test_stops_cannot_be_produced_before_the_minimum_position() -> None:
    logits = np.tile(np.array([[0.0, 1.0, 2.0]]), (3, 1))
    params = replace(
        SamplingBatch.greedy(1),
        positions=np.array([10]),
        min_position=np.array([12]),
        eos_ids=(2,),
        stop_ids=RaggedIds.of([[1]]),
    )
    proposal = Proposal(np.array([[0, 0]]), np.array([2]))
    out = Verifier().verify(logits, np.array([0, 3]), proposal, np.array([2]), params)
    assert out.emitted(0) == [0, 0, 2]


def test_penalties_with_an_empty_output_still_see_the_drafts() -> None:
    logits = np.array([[1.0, 0.9], [1.0, 0.9]])
    params = replace(
        SamplingBatch.greedy(1),
        penalties=Penalties(
            RaggedIds.of([[]], [[]]), np.array([0.5]), np.array([0.0]), np.array([1.0])
        ),
    )
    proposal = Proposal(np.array([[0]]), np.array([1]))
    out = Verifier().verify(logits, np.array([0, 2]), proposal, np.array([1]), params)
    assert out.emitted(0) == [0, 1]


def test_logprobs_are_of_unmodified_logits() -> None:
    logits = np.array([[1.0, 2.0, 0.0]])
    params = replace(SamplingBatch.uniform(1, temperature=0.3), banned=RaggedIds.of([[1, 2]]))
    out = Verifier().verify(
        logits, np.array([0, 1]), Proposal.empty(1), np.array([0]), params, logprobs=2
    )
    law = np.log(law_of(logits[0].tolist(), LawSpec()))
    assert out.emitted(0) == [0]
    assert out.logprobs == pytest.approx([law[0]])
    assert out.top_ids is not None
    assert out.top_ids.tolist() == [[1, 0]]
    assert out.top_logprobs == pytest.approx(np.array([[law[1], law[0]]]))


def test_coupled_text_does_not_depend_on_drafts_or_their_number() -> None:
    rng = np.random.default_rng(4)
    table = rng.normal(size=(7, 7)) * 1.5  # next-token logits by last token
    texts = set()
    for drafts_seed, gamma in ((0, 0), (1, 2), (2, 3), (3, 1)):
        guess, text = np.random.default_rng(drafts_seed), [3]
        while len(text) < 25:
            drafts = guess.integers(0, 7, (1, gamma))
            if gamma:
                drafts[0, 0] = int(np.argmax(table[text[-1]]))
            chain = [text[-1], *drafts[0].tolist()]
            params = SamplingBatch(
                temperature=np.array([0.9]),
                seeds=np.array([77], dtype=np.uint64),
                positions=np.array([len(text)]),
                top_p=np.array([0.95]),
                coupled=np.array([True]),
            )
            out = Verifier().verify(
                table[chain],
                np.array([0, gamma + 1]),
                Proposal(drafts, np.array([gamma])),
                np.array([gamma]),
                params,
            )
            text += out.emitted(0)
        texts.add(tuple(text[:25]))
    assert len(texts) == 1


def test_coupled_draws_follow_the_law() -> None:
    n = 60_000
    logits = np.tile(np.array([[0.5, 0.0, -1.0, 1.0]]), (n, 1))
    params = replace(SamplingBatch.uniform(n), coupled=np.ones(n, dtype=bool))
    none = Proposal.empty(n)
    out = Verifier().verify(logits, np.arange(n + 1), none, np.zeros(n, dtype=int), params)
    law = np.array(law_of(logits[0].tolist(), LawSpec()))
    counted = np.bincount(out.tokens, minlength=4)
    # chi-square with 3 degrees of freedom: 21.1 is its 1e-4 quantile
    assert float(((counted - n * law) ** 2 / (n * law)).sum()) < 21.1


def test_parameters_move_on_with_the_text() -> None:
    params = replace(random_batch(3, 5, 2, 9)[-1], max_new=np.full(5, 9), eos_ids=(1,))
    later = params.moved(params.positions + 3, np.full(5, 6))
    wanted = replace(params, positions=params.positions + 3, max_new=np.full(5, 6))
    for field in fields(wanted):
        np.testing.assert_array_equal(getattr(later, field.name), getattr(wanted, field.name))
    with pytest.raises(ShapeError, match="positions of shape"):
        params.moved(np.zeros(4, dtype=np.int64), None)


def test_uniforms_are_uniform_and_independent_over_every_key() -> None:
    rng = CounterRng()
    seeds, at = np.arange(300, dtype=np.uint64)[:, None], np.arange(300)[None, :]
    tables = [rng(p, seeds, at) for p in ("draft", "accept", "residual", "bonus", "sample")]
    for table in tables:
        assert abs(table.mean() - 0.5) < 0.005
        assert abs(table.var() - 1 / 12) < 0.002
        assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.015
        assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.015
    for a in range(5):
        for b in range(a):
            assert abs(np.corrcoef(tables[a].ravel(), tables[b].ravel())[0, 1]) < 0.015
    assert float(rng("accept", np.uint64(3), 5)) == float(tables[1][3, 5])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lens": np.array([2])}, "cu_lens"),
        ({"logits": np.zeros((3, 4))}, "2 rows"),
        ({"cu_lens": np.array([0, 3])}, "cu_lens"),
        ({"sampling": SamplingBatch.greedy(2)}, "must agree"),
        ({"proposal": Proposal(np.array([[0]]), np.array([0]))}, "drafts the proposal has"),
    ],
)
def test_misfitting_arrays_are_named(change, says) -> None:
    arguments = {
        "logits": np.zeros((2, 4)),
        "cu_lens": np.array([0, 2]),
        "proposal": Proposal(np.array([[1]]), np.array([1])),
        "lens": np.array([1]),
        "sampling": SamplingBatch.greedy(1),
    } | change
    with pytest.raises(ShapeError, match=says):
        Verifier().verify(**arguments)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Proposal(np.zeros((2, 3), int), np.zeros(3, int)), r"lengths \[R\]"),
        (lambda: Proposal(np.zeros((2, 3), int), np.array([0, 4])), r"0\.\.3"),
        (lambda: Proposal(np.zeros((1, 2), int), np.array([2]), q=np.ones((1, 3, 4))), "gamma"),
        (lambda: Proposal(np.zeros((1, 2), int), np.array([2]), conf=np.ones((1, 3))), "conf"),
        (
            lambda: Proposal(
                np.zeros((1, 1), int), np.array([1]), q=np.ones((1, 1, 2)), deterministic=True
            ),
            "point mass",
        ),
        (lambda: SparseQ(np.zeros((1, 2)), np.zeros((1, 2))), "one shape"),
        (lambda: SamplingBatch.uniform(2, temperature=-1.0), "temperatures"),
        (lambda: replace(SamplingBatch.greedy(2), top_p=np.ones(3)), "top_p"),
        (lambda: RaggedIds(np.array([0, 2]), np.array([1])), "cu"),
    ],
)
def test_misuse_of_the_values_is_named(build, says) -> None:
    with pytest.raises(ShapeError, match=says):
        build()


def test_an_empty_batch_is_legal() -> None:
    out = Verifier().verify(
        np.zeros((0, 4)),
        np.array([0]),
        Proposal.empty(0, 2),
        np.zeros(0, int),
        SamplingBatch.greedy(0),
    )
    assert out.tokens.size == 0
