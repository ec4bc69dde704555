"""The drafters that need no checkpoint keep what every drafter promises; broken ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_dspark import DraftModelDrafter, MixedDrafter, NGramDrafter, Proposal
from deepinfer_dspark.testing import DrafterContract, PairTarget


class PairModel:
    """`CausalModel` over a `PairTarget`."""

    max_length = None

    def __init__(self, seed: int) -> None:
        self.target = PairTarget(seed=seed)

    def logits(self, request_ids, texts):
        return np.stack([self.target.logits(text) for text in texts])

    def forget(self, request_id):
        pass


class TestNGram(DrafterContract):
    def make(self):
        return NGramDrafter(3, n_min=1)


class TestDraftModel(DrafterContract):
    def make(self):
        return DraftModelDrafter(PairModel(8), 3)


class TestSparseDraftModel(DrafterContract):
    def make(self):
        return DraftModelDrafter(PairModel(8), 3, sparse=3)


class TestMixed(DrafterContract):
    def make(self):
        return MixedDrafter(NGramDrafter(3, n_min=1), DraftModelDrafter(PairModel(8), 3))


class Boasting(NGramDrafter):
    """Names a q that its drafts were not drawn from."""

    def propose(self, batch, rng):
        made = super().propose(batch, rng)
        q = np.full((*made.tokens.shape, 6), 1 / 6)
        return Proposal(made.tokens, made.lengths, q=q)


class Eager(NGramDrafter):
    """Ignores how many drafts are wanted."""

    def propose(self, batch, rng):
        return Proposal(np.zeros((batch.requests, 3), int), np.full(batch.requests, 3))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Boasting, "test_sampled_tokens_keep_the_distribution_of_the_target"),
        (Eager, "test_no_more_drafts_than_wanted"),
    ],
)
def test_a_broken_drafter_fails(broken, test) -> None:
    class Contract(DrafterContract):
        def make(self):
            return broken(3, n_min=1)

    with pytest.raises(AssertionError):
        getattr(Contract(), test)()
