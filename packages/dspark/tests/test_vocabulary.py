"""Draft models with another tokenizer: matched by string, lossless, reading the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from toymodel import ToyCausal, ToyModel, ToyTarget, plain

from deepinfer_dspark import DraftModelDrafter, SamplingBatch, ShapeError, SpecLoop
from deepinfer_dspark.drafters.vocabulary import TranslatedModel, VocabularyMap

TARGET = ToyModel(vocab=12, seed=0)
LETTERS = "abcdefghijkl"
SAME = {letter: i for i, letter in enumerate(LETTERS)}
TURNED = {letter: 11 - i for i, letter in enumerate(LETTERS)}


class Turned(ToyCausal):
    """The target itself behind ids in another order."""

    def logits(self, request_ids, texts):
        return super().logits(request_ids, [[11 - t for t in text] for text in texts])[:, ::-1]


def test_tokens_of_one_string_are_one_token() -> None:
    made = VocabularyMap.of({"a": 0, "b": 1, "ab": 2, "abx": 3}, {"b": 0, "a": 1, "zz": 2})
    assert made.to_target.tolist() == [1, 0, -1]
    assert made.spelled == ((1,), (0,), (1, 0), ())
    assert made.shared == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_behind_other_ids_drafts_as_well_as_with_its_own(temperature: float) -> None:
    model = TranslatedModel(Turned(TARGET), VocabularyMap.of(SAME, TURNED))
    sampling = SamplingBatch.uniform(2, temperature=temperature)
    own, other = (
        SpecLoop(DraftModelDrafter(m, 3), ToyTarget(TARGET)).generate([[5, 6], [1]], sampling, 24)
        for m in (ToyCausal(TARGET), model)
    )
    assert own.tokens == other.tokens
    assert own.rounds == other.rounds == 6
    assert not any(r.invalid.any() for r in other.results)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_smaller_vocabulary_drafts_what_it_has_and_text_stays_exact(temperature: float) -> None:
    few = {letter: i for i, letter in enumerate("abcdef")}
    model = TranslatedModel(ToyCausal(ToyModel(vocab=6, seed=3)), VocabularyMap.of(SAME, few))
    sampling = SamplingBatch.uniform(2, temperature=temperature)
    made = SpecLoop(DraftModelDrafter(model, 3), ToyTarget(TARGET)).generate(
        [[5, 6], [11]], sampling, 24
    )
    if temperature == 0:
        assert made.tokens == [plain(TARGET, [5, 6], 24), plain(TARGET, [11], 24)]
    assert made.verified > 0
    assert not any(r.invalid.any() for r in made.results)


def test_the_whole_text_is_read_in_pieces_and_again_when_it_changes() -> None:
    class Seen(ToyCausal):
        def logits(self, request_ids, texts):
            self.texts = texts
            return super().logits(request_ids, texts)

    vocabulary = VocabularyMap.of({"a": 0, "b": 1, "ab": 2, "?": 3}, {"a": 0, "b": 1})
    inner = Seen(ToyModel(vocab=2))
    model = TranslatedModel(inner, vocabulary)
    for text, want in (([2, 0], [0, 1, 0]), ([2, 0, 1], [0, 1, 0, 1]), ([2, 1], [0, 1, 1]),
                       ([3], [0]), ([3, 1], [1])):  # fmt: skip
        logits = model.logits(["r"], [text])
        assert inner.texts == [want]
        assert logits.shape == (1, 4)
        assert np.isneginf(logits[0, 2:]).all()
    model.forget("r")
    inner.max_length = 3
    model.logits(["r"], [[2, 2, 0]])
    assert inner.texts == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("target", "draft"),
    [({"a": 0}, {"b": 0}), ({"a": -1}, {"a": 0}), ({}, {"a": 0}), ({"a": 0, "b": 0}, {"a": 0})],
)
def test_vocabularies_that_fit_nothing_are_refused(target, draft) -> None:
    with pytest.raises(ShapeError, match="vocabular"):
        VocabularyMap.of(target, draft)


def test_a_token_the_target_does_not_have_is_named() -> None:
    model = TranslatedModel(Turned(TARGET), VocabularyMap.of(SAME, TURNED))
    with pytest.raises(ShapeError, match="no token 12"):
        model.logits(["r"], [[12]])
