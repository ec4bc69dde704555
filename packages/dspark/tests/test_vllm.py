"""The vLLM proposer, driven as vLLM's documentation of its custom proposer says vLLM drives it.

Interface: vllm.v1.spec_decode.custom_class_proposer, vLLM 0.32; `test_vllm_engine.py` runs the
real one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer_dspark import (
    BudgetScheduler,
    LosslessnessError,
    NGramDrafter,
    Proposal,
    ShapeError,
    StepTable,
)
from deepinfer_dspark.drafters.mixed import DraftModelDrafter
from deepinfer_dspark.vllm import DrafterProposer, NGramProposer


def load(name: str):
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


toy = load("toymodel")
MODEL = toy.ToyModel()
LENGTH = 64


def config(drafts: int = 4, length: int = LENGTH) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts,
            method="custom_class",
            model="deepinfer_dspark.vllm.NGramProposer",
        ),
        model_config=SimpleNamespace(max_model_len=length),
    )


class StubRunner:
    """A token table, requests in rows that move when one ends, greedy verification of drafts."""

    def __init__(self, proposer, prompts, new: int, *, as_torch: bool = False) -> None:
        self.proposer, self.new, self.as_torch = proposer, new, as_torch
        self.table = np.zeros((len(prompts), LENGTH), dtype=np.int32)
        self.rows = [(r, len(p)) for r, p in enumerate(prompts)]
        self.texts = [list(p) for p in prompts]
        self.accepted = self.passes = 0

    def run(self):
        drafts: list[list[int]] = [[] for _ in self.rows]
        while self.rows:
            sampled = []
            for (r, _), own in zip(self.rows, drafts, strict=True):
                self.passes += 1
                before = len(self.texts[r])
                for token in [*own, None]:
                    best = toy.plain(MODEL, self.texts[r], 1)[0]
                    self.texts[r].append(best)
                    if token != best:
                        break
                self.accepted += len(self.texts[r]) - before - 1
                sampled.append(self.texts[r][before:])
            for i, (r, _) in enumerate(self.rows):
                self.table[i, : len(self.texts[r])] = self.texts[r]
            counts = np.array([len(self.texts[r]) for r, _ in self.rows])
            keep = [i for i, (r, n) in enumerate(self.rows) if len(self.texts[r]) - n < self.new]
            # the last row moves into the place of the first that ended
            if len(keep) < len(self.rows):
                keep = keep[::-1]
                self.rows = [self.rows[i] for i in keep]
                sampled = [sampled[i] for i in keep]
                self.table[: len(keep)] = self.table[keep]
                counts = counts[keep]
            table = self.table
            if self.as_torch:
                table = pytest.importorskip("torch").from_numpy(self.table)
            drafts = self.proposer.propose(
                sampled_token_ids=sampled,
                num_tokens_no_spec=counts,
                token_ids_cpu=table,
                slot_mappings=None,
            )
        return self.texts


PROMPTS = [[1, 2, 3, 1, 2], [4, 4, 4], [5, 6, 7, 8], [9, 9, 9]]


class ModelProposer(DrafterProposer):
    def build_drafter(self, max_tokens):
        return DraftModelDrafter(toy.ToyCausal(MODEL), max_tokens)


class ScheduledProposer(NGramProposer):
    def build_scheduler(self, max_tokens):
        return BudgetScheduler(StepTable.linear(1.0, 0.2, grid=1, top=64), max_tokens, "exact")


def test_signatures_are_the_documented_ones() -> None:
    assert list(inspect.signature(DrafterProposer.propose).parameters) == [
        "self", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu", "slot_mappings",
    ]  # fmt: skip
    assert list(inspect.signature(NGramProposer.__init__).parameters) == ["self", "vllm_config"]
    module, name = config().speculative_config.model.rsplit(".", 1)
    made = getattr(importlib.import_module(module), name)(config())
    made.load_model(object())  # vLLM hands every proposer its target
    assert made.num_speculative_tokens == 4


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("proposer", [NGramProposer, ModelProposer, ScheduledProposer])
def test_greedy_text_is_kept_while_rows_move_between_requests(proposer, as_torch: bool) -> None:
    runner = StubRunner(proposer(config()), PROMPTS, 20, as_torch=as_torch)
    texts = runner.run()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        new = text[len(prompt) :]
        assert new == toy.plain(MODEL, prompt, len(new))
    assert runner.accepted > 0
    if proposer is ModelProposer:
        assert runner.accepted / runner.passes > 2.5


def test_acceptance_reaches_the_drafter() -> None:
    class Remembering(NGramDrafter):
        heard: tuple = ()

        def observe(self, request_ids, result):
            self.heard = (*self.heard, (result.n_accepted.tolist(), result.judged.tolist()))
            super().observe(request_ids, result)

    class Proposer(DrafterProposer):
        def build_drafter(self, max_tokens):
            return Remembering(max_tokens)

    made = Proposer(config(3))
    table = np.zeros((1, 20), dtype=np.int64)
    text = [1, 2, 3, 1, 2]
    table[0, :5] = text
    assert made.propose([[2]], np.array([5]), table) == [[3, 1, 2]]
    table[0, 5:8] = [3, 1, 7]  # two drafts kept, then another token
    assert made.propose([[3, 1, 7]], np.array([8]), table) == [[]]
    assert made._drafter.heard == (([2], [3]),)
    assert made.propose([[]], np.array([8]), table) == [[]]  # a prompt that is still computed


def test_another_request_in_a_row_starts_anew() -> None:
    made, table = NGramProposer(config(2)), np.zeros((1, 20), dtype=np.int64)
    table[0, :5] = [1, 2, 3, 1, 2]
    assert made.propose([[2]], 5, table) == [[3, 1]]
    # one token longer, as if the first had gone on, but another text
    table[0, :6] = [4, 5, 6, 7, 1, 2]
    assert made.propose([[2]], 6, table) == [[]]
    table[0, :7] = [4, 5, 6, 7, 1, 2, 9]
    assert made.propose([[9]], 7, table) == [[]]
    table[0, :9] = [4, 5, 6, 7, 1, 2, 9, 1, 2]
    assert made.propose([[1, 2]], 9, table) == [[9, 1]]


def test_drafts_stop_at_the_longest_text_the_model_takes() -> None:
    made = NGramProposer(config(4, length=7))
    table = np.array([[1, 2, 3, 1, 2, 0, 0]])
    assert made.propose([[2]], 5, table) == [[3, 1]]


def test_sampled_drafts_and_short_tables_are_refused() -> None:
    class Sampling(NGramDrafter):
        def propose(self, batch, rng):
            q = np.full((1, 2, 4), 0.25)
            return Proposal(np.zeros((1, 2), dtype=int), np.array([2]), q=q)

    class Proposer(DrafterProposer):
        def build_drafter(self, max_tokens):
            return Sampling(max_tokens)

    with pytest.raises(LosslessnessError, match="point masses"):
        Proposer(config(2)).propose([[1]], 1, np.array([[1]]))
    with pytest.raises(ShapeError, match="token_ids_cpu"):
        NGramProposer(config()).propose([[1], [2]], 1, np.array([[1]]))
