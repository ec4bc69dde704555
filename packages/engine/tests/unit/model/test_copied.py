"""Drafts copied from the text, for models without a draft module; nothing here is timed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dense_checkpoint import write_dense

from deepinfer_engine.adapters.dspark import CounterRng, Proposal, SamplingBatch
from deepinfer_engine.core.device import CPU
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.copied import DRAFTS, CopiedDrafts, CopyBudget
from deepinfer_engine.model.dense.runtime import DenseModel
from deepinfer_engine.model.runner import TorchRunner, build_runner

GREEDY = SamplingParams(temperature=0.0)


def copied(lengths: list[int], conf: float, most: int = 5) -> Proposal:
    shape = len(lengths), most
    return Proposal(np.zeros(shape, dtype=np.int64), np.array(lengths), conf=np.full(shape, conf))


def learned(per_token: float, largest: int = 64) -> CopyBudget:
    """After steps of every size, of which each token more costs so much of the first."""
    budget = CopyBudget(5)
    for fed in range(1, largest + 1):
        budget.timed(1, fed, 1, 10.0 * (1 + per_token * (fed - 1)), drafted=False)
    return budget


def test_where_a_token_more_costs_nothing_all_that_was_found_is_verified() -> None:
    lengths = learned(0.0).lengths(copied([5, 0, 3], 0.9), np.array([5, 5, 2]))
    assert lengths.tolist() == [5, 0, 2]


def test_where_a_token_more_costs_a_token_none_is() -> None:
    assert not learned(1.0).lengths(copied([5, 5], 0.9), np.array([5, 5])).any()


@pytest.mark.parametrize(("promised", "verified"), [(1.02, 0), (1.05, 1)])
def test_a_gain_smaller_than_the_measurements_are_good_for_is_none(promised, verified) -> None:
    budget = learned(1.5 / promised - 1)  # one draft of one half: 1.5 tokens
    assert budget.lengths(copied([1], 0.5), np.array([5])).tolist() == [verified]


def test_where_copies_seldom_come_true_none_is() -> None:
    assert not learned(0.2).lengths(copied([5], 0.1), np.array([5])).any()


def test_before_any_step_was_timed_none_is_and_wide_steps_are_tried_step_by_step() -> None:
    budget, most = CopyBudget(5), np.array([5])
    tried = []
    for _ in range(5):
        (drafts,) = budget.lengths(copied([5], 0.9), most).tolist()
        tried.append(drafts)
        budget.timed(1, 1 + drafts, 1 + drafts, 10.0, drafted=drafts > 0)
    assert tried == [0, 1, 3, 5, 5]


def test_a_slot_that_passes_to_another_text_forgets_the_first() -> None:
    drafts, rng, most = CopiedDrafts(3), CounterRng(), np.array([3])

    def propose(history: list[int]) -> list[int]:
        row = DecodeRow(history, 2, range(1, 2), 1, GREEDY, 3)
        proposal = drafts.propose([row], most, 3, SamplingBatch.greedy(1), rng)
        return proposal.tokens[0, : proposal.lengths[0]].tolist()

    assert propose([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert propose([9, 9, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3]) == []
    again = [7, 8, 9, 7, 8]
    assert propose(again) == [9, 7, 8]
    again += [9, 6]
    assert propose(again) == []


def generate(runner: TorchRunner, sampling: SamplingParams, steps: int) -> tuple[list[int], int]:
    """(tokens of two sequences end to end, drafts accepted); their prompts repeat themselves."""
    histories, accepted = [], 0
    for slot, seed in ((1, 3), (2, 4)):
        ids = np.tile(np.random.default_rng(seed).integers(20, 60, 10), 4)
        chunk = PrefillChunk(
            ids, 0, (), [slot * 2 - 1, slot * 2], slot, sampling, True,
            prompt_len=40, prompt=ids.tolist(),
        )  # fmt: skip
        (first,) = runner.prefill([chunk])
        assert first is not None
        histories.append([*ids.tolist(), *first.tokens])
    while min(map(len, histories)) < 40 + steps:
        rows = [
            DecodeRow(h, 40, [2 * i + 1, 2 * i + 2], i + 1, sampling, runner.caps.nextn)
            for i, h in enumerate(histories)
        ]
        for history, out in zip(histories, runner.decode(rows), strict=True):
            history += out.tokens
            accepted += out.n_accepted
    return [t for h in histories for t in h[40 : 40 + steps]], accepted


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=99),
        SamplingParams(temperature=0.05, seed=7, ignore_eos=True, max_tokens=99),
        SamplingParams(temperature=1.0, seed=7, top_p=0.2, ignore_eos=True, max_tokens=99),
    ],
    ids=["greedy", "cool", "sampled"],
)
def test_the_text_is_that_without_drafts(tmp_path: Path, sampling: SamplingParams) -> None:
    made = build_runner(
        write_dense(tmp_path / "model"), dtype="float64", num_blocks=8, num_state_slots=4
    )
    assert made.caps.nextn == DRAFTS
    ticks = itertools.count()
    always = TorchRunner(made.model, made.caps, CPU, clock=lambda: next(ticks))  # steps cost alike
    text, accepted = generate(always, sampling, 60)
    plain = TorchRunner(made.model, replace(made.caps, nextn=0))
    assert text == generate(plain, sampling, 60)[0]
    assert accepted > 0 or sampling.temperature == 1.0


def test_a_state_without_room_for_them_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models with windows keep room for the drafts of their own module alone."""
    folder = write_dense(tmp_path / "model")
    assert build_runner(folder, num_blocks=8, num_state_slots=4, nextn=7).caps.nextn == 7
    monkeypatch.setattr(DenseModel, "window", 4)
    assert build_runner(folder, num_blocks=8, num_state_slots=4).caps.nextn == 0
    with pytest.raises(ConfigError, match="nextn"):
        build_runner(folder, num_blocks=8, num_state_slots=4, nextn=1)
