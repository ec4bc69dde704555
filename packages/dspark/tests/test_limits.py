"""Ends of contexts and answers, padded vocabularies, failures: no draft is made for nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toymodel import ToyCausal, ToyModel, ToyTarget, plain

from deepinfer_dspark import (
    CounterRng,
    DraftBatch,
    DraftModelDrafter,
    MixedDrafter,
    NGramDrafter,
    Proposal,
    SamplingBatch,
    ShapeError,
    SpecLoop,
)

MODEL = ToyModel()
PROMPT = [5, 6] * 10


class Bounded(ToyTarget):
    """A target of `max_length` positions that breaks beyond them, as learned ones do."""

    def __init__(self, model: ToyModel, max_length: int | None) -> None:
        super().__init__(model)
        self.max_length = max_length

    def forward(self, tokens, cu_lens, positions, state):
        assert self.max_length is None or positions.max() < self.max_length
        assert (tokens >= 0).all()
        assert (tokens < self.vocab_size).all()
        return super().forward(tokens, cu_lens, positions, state)


def drafters():
    return {
        "none": None,
        "n-gram": NGramDrafter(4),
        "model": DraftModelDrafter(ToyCausal(MODEL), 4),
        "short model": DraftModelDrafter(ToyCausal(MODEL, max_length=25), 4),
        "mixed": MixedDrafter(NGramDrafter(4), DraftModelDrafter(ToyCausal(MODEL), 4)),
    }


@pytest.mark.parametrize("name", drafters())
def test_an_answer_may_end_where_the_context_ends(name: str) -> None:
    made = SpecLoop(drafters()[name], Bounded(MODEL, 31)).generate(
        [PROMPT], SamplingBatch.greedy(1), 12
    )
    assert made.tokens == [plain(MODEL, PROMPT, 12)]


def test_what_the_context_cannot_hold_is_one_clear_error() -> None:
    with pytest.raises(ShapeError, match="32 positions and the model has 31"):
        SpecLoop(NGramDrafter(4), Bounded(MODEL, 31)).generate(
            [PROMPT], SamplingBatch.greedy(1), 13
        )


@pytest.mark.parametrize("name", ["n-gram", "model", "mixed"])
def test_one_token_to_go_drafts_nothing(name: str) -> None:
    causal = ToyCausal(MODEL)
    model = DraftModelDrafter(causal, 4)
    drafter = {
        "n-gram": NGramDrafter(4), "model": model, "mixed": MixedDrafter(NGramDrafter(4), model),
    }[name]  # fmt: skip
    made = SpecLoop(drafter, ToyTarget(MODEL)).generate([[5, 6]], SamplingBatch.greedy(1), 1)
    assert (causal.passes, made.verified, made.rows) == ([], 0, 1)


def test_no_draft_goes_past_the_last_token_an_answer_can_use() -> None:
    causal = ToyCausal(MODEL)
    made = SpecLoop(DraftModelDrafter(causal, 4), ToyTarget(MODEL)).generate(
        [[5, 6], [3]], SamplingBatch.greedy(2), 4
    )
    assert made.rounds == 1
    assert (made.verified, len(causal.passes)) == (6, 3)


def batch(histories, **changes) -> DraftBatch:
    R = len(histories)
    made = DraftBatch(
        list(range(R)),
        np.array([h[-1] for h in histories]),
        np.array([len(h) - 1 for h in histories]),
        histories,
        SamplingBatch.uniform(R, temperature=0.7),
        np.zeros(R, dtype=np.int64),
    )
    return replace(made, **changes)


def test_the_model_is_asked_only_for_rows_without_a_match() -> None:
    causal = ToyCausal(MODEL)
    mixed = MixedDrafter(NGramDrafter(3), DraftModelDrafter(causal, 3))
    proposal = mixed.propose(batch([[5, 6, 5, 6], [1, 2, 3], [7, 8, 9, 7, 8]]), CounterRng())
    assert causal.passes == [1, 1, 1]
    assert proposal.lengths.tolist() == [3, 3, 3]
    causal.passes.clear()
    mixed.reset(1)
    proposal = mixed.propose(batch([[5, 6, 5, 6], [7, 8, 9, 7, 8]]), CounterRng())
    assert causal.passes == []
    assert proposal.deterministic


def test_a_draft_model_runs_only_the_rows_that_want_more() -> None:
    causal = ToyCausal(MODEL)
    drafter = DraftModelDrafter(causal, 4)
    wanted = np.array([0, 3, 1, 9])
    proposal = drafter.propose(batch([[1], [2], [3], [4]], wanted=wanted), CounterRng())
    assert proposal.lengths.tolist() == [0, 3, 1, 4]
    assert causal.passes == [3, 2, 2, 1]


@pytest.mark.parametrize("sparse", [None, 3])
def test_rows_that_end_early_keep_exact_distributions(sparse: int | None) -> None:
    drafter = DraftModelDrafter(ToyCausal(MODEL), 3, sparse=sparse)
    both = drafter.propose(batch([[1, 4], [2, 7]], wanted=np.array([1, 3])), CounterRng())
    alone = DraftModelDrafter(ToyCausal(MODEL), 3, sparse=sparse).propose(
        replace(batch([[2, 7]]), request_ids=[1], sampling=batch([[1], [1]]).sampling.select(
            np.array([1]))), CounterRng()
    )  # fmt: skip
    assert both.tokens[1].tolist() == alone.tokens[0].tolist()
    q, one = (both.q, alone.q) if sparse is None else (both.q.probs, alone.q.probs)
    np.testing.assert_allclose(q[1], one[0], atol=1e-12)


class Wide(ToyCausal):
    """A drafter whose vocabulary is padded by 4 ids, which it likes."""

    def logits(self, request_ids, texts):
        own = super().logits(request_ids, [[t % 12 for t in text] for text in texts])
        return np.concatenate([own, own.max(axis=1, keepdims=True) + np.zeros((1, 4))], axis=1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab_size", [None, 12])
def test_padded_draft_vocabularies_work_with_and_without_their_size(
    vocab_size: int | None, temperature: float
) -> None:
    drafter = DraftModelDrafter(Wide(MODEL), 3, vocab_size=vocab_size)
    sampling = SamplingBatch.uniform(2, temperature=temperature)
    made = SpecLoop(drafter, Bounded(MODEL, None)).generate([[5, 6], [1]], sampling, 20)
    assert [len(t) for t in made.tokens] == [20, 20]
    assert max(max(t) for t in made.tokens) < 12
    assert not any(r.invalid.any() for r in made.results)
    if temperature == 0:
        assert made.tokens == [plain(MODEL, [5, 6], 20), plain(MODEL, [1], 20)]


class Foolish(NGramDrafter):
    """Proposes ids that no vocabulary has, and more than was asked for."""

    def propose(self, batch: DraftBatch, rng: object) -> Proposal:
        tokens = np.tile(np.array([[99, -7, 3, 10**12]]), (batch.requests, 1))
        return Proposal(tokens, np.full(batch.requests, 4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_foolish_drafts_cost_passes_and_nothing_else(temperature: float) -> None:
    made = SpecLoop(Foolish(4), Bounded(MODEL, 22)).generate(
        [PROMPT], SamplingBatch.uniform(1, temperature=temperature), 3
    )
    assert len(made.tokens[0]) == 3
    if temperature == 0:
        assert made.tokens == [plain(MODEL, PROMPT, 3)]


@pytest.mark.parametrize("name", ["n-gram", "model", "mixed"])
def test_after_a_failed_batch_a_drafter_starts_anew(name: str) -> None:
    class Failing(ToyTarget):
        calls = 0

        def forward(self, *arguments):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("no memory")
            return super().forward(*arguments)

    drafter, fresh = drafters()[name], drafters()[name]
    with pytest.raises(RuntimeError, match="no memory"):
        SpecLoop(drafter, Failing(MODEL)).generate([[5, 6]], SamplingBatch.greedy(1), 40)
    prompt = [7, 9, 11, 3, 7, 9, 2, 8]
    again = SpecLoop(drafter, ToyTarget(MODEL)).generate([prompt], SamplingBatch.greedy(1), 12)
    assert again.tokens == [plain(MODEL, prompt, 12)]
    assert (
        again.rounds
        <= 1
        + SpecLoop(fresh, ToyTarget(MODEL)).generate([prompt], SamplingBatch.greedy(1), 12).rounds
    )


def test_resetting_after_a_failure_reaches_the_drafter() -> None:
    class Counting(NGramDrafter):
        def __init__(self) -> None:
            super().__init__(4)
            self.dropped: list[object] = []

        def reset(self, request_id) -> None:
            self.dropped.append(request_id)
            super().reset(request_id)

    class Failing(ToyTarget):
        def forward(self, *arguments):
            raise RuntimeError("no memory")

    drafter = Counting()
    with pytest.raises(RuntimeError, match="no memory"):
        SpecLoop(drafter, Failing(MODEL)).generate([[5], [6]], SamplingBatch.greedy(2), 4)
    assert drafter.dropped == [0, 1]
