"""Dense families beside transformers' own classes, on the same random checkpoints in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Record
from dense_checkpoint import MODELS, write_dense

from deepinfer_engine import LLM, SamplingParams
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; run `nox -s oracle`"
)

CLOSE = 1e-4
PROMPTS, NEW = 20, 64
LENGTH = 300


@pytest.fixture(params=sorted(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_dense(tmp_path / request.param, request.param, seed=3)


def theirs_of(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def test_logits(folder: Path, record: Record) -> None:
    ids = np.random.default_rng(1).integers(3, 320, LENGTH)
    runner = build_runner(folder, num_blocks=8, num_state_slots=1)
    ours = [
        runner.model.forward([SequenceRows(ids[a:b], a, (), [1, 2, 3], 0)], None)
        for a, b in ((0, 130), (130, 131), (131, LENGTH))
    ]
    with torch.inference_mode():
        theirs = theirs_of(folder)(torch.from_numpy(ids)[None]).logits[0]
    assert theirs.abs().max() > 1
    what = f"logits of dense models, {LENGTH} tokens in three pieces"
    assert record(what, torch.cat(ours), theirs, "transformers")[0] < CLOSE


def test_greedy_text(folder: Path) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 320, n).tolist() for n in rng.integers(1, 200, PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with LLM(folder) as llm:
        ours = [list(c.token_ids) for c in llm.generate(prompts, params)]
    model = theirs_of(folder)
    for prompt, tokens in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert tokens == out[0, len(prompt) :].tolist()
