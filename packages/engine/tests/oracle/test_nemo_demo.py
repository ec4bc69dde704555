"""The embedded demo checkpoint, a trained model, read and run by NeMo: the same text, the same
drafts. Trained weights leave margins that random ones do not, so cache rounding stays on."""

from __future__ import annotations

import nemo
import numpy as np
import pytest
import torch
from conftest import Record

from deepinfer_engine import LLM, SamplingParams, load_model
from deepinfer_engine.demo import demo_path
from deepinfer_engine.model.files import load_tokenizer

PROMPTS = [
    "Ana lived near the garden with",
    "Once there was a fox who",
    "The boat was small, and",
    "Every morning the old baker",
]
TOKENS = 64


@pytest.fixture(scope="module")
def texts() -> list[tuple[int, np.ndarray]]:
    """(prompt length, prompt and greedy answer) of each prompt, as served: with drafts."""
    tokenizer = load_tokenizer(demo_path())
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM() as llm:
        prompts = [tokenizer.encode(text).ids for text in PROMPTS]
        answers = llm.generate(prompts, greedy)
    return [
        (len(p), np.array([*p, *answer.token_ids]))
        for p, answer in zip(prompts, answers, strict=True)
    ]


def test_greedy_text_of_the_served_engine_is_nemos(
    texts: list[tuple[int, np.ndarray]], record: Record
) -> None:
    backbone, model = nemo.backbone(demo_path()), load_model(demo_path(), dtype="float32")
    ours, theirs = [], []
    for start, ids in texts:
        theirs.append(nemo.logits(backbone, ids))
        assert theirs[-1][start - 1 : -1].argmax(-1).tolist() == ids[start:].tolist()
        ours.append(model.prefill(ids)[0])
    what = f"logits of the demo model, {len(texts)} texts, cache rounding"
    assert record(what, torch.cat(ours), torch.cat(theirs))[1] < 1e-4


def test_drafts_of_the_demo_model(texts: list[tuple[int, np.ndarray]], record: Record) -> None:
    backbone, drafter = nemo.backbone(demo_path()), nemo.drafter(demo_path())
    model = load_model(demo_path(), dtype="float32")
    ours, theirs = [], []
    for start, ids in texts:
        for at in range(start, len(ids) - 1, 9):
            block = nemo.Drafted(backbone, drafter, ids[:at], int(ids[at]))
            proposal = model.draft(model.prefill(ids[:at])[1], int(ids[at]))
            assert proposal.tokens[0].tolist() == block.tokens.tolist()
            ours.append(torch.from_numpy(proposal.conf[0]))
            theirs.append(block.confidence)
    what = f"confidences of {len(ours)} draft blocks of the demo model, cache rounding"
    assert record(what, torch.cat(ours), torch.cat(theirs))[1] < 1e-4
