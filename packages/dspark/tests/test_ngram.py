"""What n-gram drafts know of one text, beside all texts, and of a text that comes long."""

from __future__ import annotations

import numpy as np

from deepinfer_dspark import CounterRng, DraftBatch, NGramDrafter, Proposal, SamplingBatch


def propose(drafter: NGramDrafter, name: str, history: list[int]) -> Proposal:
    last = np.array([len(history) - 1])
    batch = DraftBatch(
        [name], np.array(history[-1:]), last, [history], SamplingBatch.greedy(1), last
    )
    return drafter.propose(batch, CounterRng())


def test_a_text_that_does_not_follow_its_copies_is_trusted_less_than_others() -> None:
    drafter = NGramDrafter(3)
    phrase = [1, 2, 3, 4, 5, 6, 7, 8]
    faithful, stray = [*phrase, 1, 2], [*phrase, 1, 2]
    first = propose(drafter, "stray", stray).conf
    assert first is not None
    for odd in range(100, 110):  # every copy of the phrase begins and goes elsewhere
        stray += [odd, 1, 2]
        after = propose(drafter, "stray", stray).conf
    other = propose(drafter, "faithful", faithful).conf
    assert after is not None
    assert other is not None
    assert after[0, 0] < first[0, 0] / 2
    assert after[0, 0] < other[0, 0] / 2


def test_of_a_new_text_only_its_end_is_looked_into_and_of_what_comes_all() -> None:
    near, far = [11, 12, 13, 14], [21, 22, 23, 24]
    filler = list(range(1000, 1100))
    history = [*far, *filler, *near, 31, 32, 21, 22]
    assert propose(NGramDrafter(2), "t", list(history)).tokens.tolist() == [[23, 24]]
    drafter = NGramDrafter(2, first_indexed=20)
    assert propose(drafter, "t", history).lengths.tolist() == [0]
    history += [41, 11, 12]
    assert propose(drafter, "t", history).tokens.tolist() == [[13, 14]]
    history += [51, 52, 53, *filler, 51, 52]  # far behind by now, and indexed when it came
    assert propose(drafter, "t", history).tokens[0, 0] == 53
