"""deepinfer_dspark reads this family's draft modules on its own: same drafts as this runtime's
drafter and as the dense twin, from the same checkpoint directories."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from quantised_checkpoint import write_quantised

from deepinfer_dspark import CounterRng, DraftBatch, SamplingBatch
from deepinfer_dspark.drafters.block import DSparkDrafter
from deepinfer_engine.demo import demo_path
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.batch import Batch

TOLERANCE = 1e-10


def batch(ids: np.ndarray, start: int, features: torch.Tensor, temperature: float) -> DraftBatch:
    """One request whose anchor is the last of `ids`; features of positions start..anchor-1."""
    return DraftBatch(
        ["r"],
        ids[-1:],
        np.array([len(ids) - 1]),
        [ids.tolist()],
        SamplingBatch.uniform(1, temperature=temperature),
        np.zeros(1, dtype=np.int64),
        features,
        np.array([0, len(ids) - 1 - start]),
    )


@pytest.mark.parametrize("where", ["tiny", "demo"])
@pytest.mark.parametrize("length", [2, 20, 150])
def test_drafts_laws_and_confidences_equal_the_dense_twins(
    tiny_dir: Path, twin: ModuleType, where: str, length: int
) -> None:
    path = tiny_dir if where == "tiny" else demo_path()
    ids = np.random.default_rng(length).integers(20, 320, size=length)
    dense = twin.load_twin(path, torch.float64)
    known = torch.from_numpy(ids[:-1])[None]
    drafts, logits, confidence = dense.draft(known, torch.from_numpy(ids[-1:]))
    features = dense.features(known)[0]
    drafter = DSparkDrafter.load(path, dtype=torch.float64)
    # in two rounds: the window keeps what the second still needs of the first
    cut = length // 3
    if cut:
        drafter.propose(batch(ids[: cut + 1], 0, features[:cut], 0.0), CounterRng())
    out = drafter.propose(batch(ids, cut, features[cut:], 0.0), CounterRng())
    assert out.tokens.tolist() == drafts.tolist()
    assert np.abs(out.conf - confidence.detach().numpy()).max() < TOLERANCE
    once = DSparkDrafter.load(path, dtype=torch.float64)
    sampled = once.propose(batch(ids, 0, features, 1.0), CounterRng())
    # the first draft's law sees no sampled token yet
    assert (sampled.q[0, 0] - logits[0, 0].softmax(-1)).abs().max() < TOLERANCE


def test_drafts_equal_this_runtimes_on_the_embedded_checkpoint(twin: ModuleType) -> None:
    ids = np.random.default_rng(5).integers(20, 1500, size=70)
    runner = build_runner(demo_path(), dtype="float64", num_blocks=4, num_state_slots=2)
    rows = SequenceRows(ids[:-1], 0, (), [1, 2], 1)
    runner.model._backbone.forward(Batch(runner.model._text, [rows]), None)
    block = runner.model._drafts._drafter.run(
        torch.from_numpy(ids[-1:]),
        torch.tensor([len(ids) - 1]),
        torch.tensor([1]),
        5,
        lambda _, logits: logits.argmax(-1),
    )
    dense = twin.load_twin(demo_path(), torch.float64)
    features = dense.features(torch.from_numpy(ids[:-1])[None])[0]
    out = DSparkDrafter.load(demo_path(), dtype=torch.float64).propose(
        batch(ids, 0, features, 0.0), CounterRng()
    )
    assert out.tokens.tolist() == block.tokens.tolist()
    assert np.abs(out.conf - block.confidence.numpy()).max() < TOLERANCE


def test_a_quantised_directory_drafts_what_its_values_draft(tiny_dir: Path, tmp_path: Path) -> None:
    write_quantised(tiny_dir, tmp_path / "q", tmp_path / "plain", prefix="model.", shards=3)
    ids = np.random.default_rng(2).integers(20, 320, size=30)
    features = torch.randn(29, 3 * 64, dtype=torch.float64)
    a, b = (
        DSparkDrafter.load(tmp_path / name, dtype=torch.float64).propose(
            batch(ids, 0, features, 1.0), CounterRng()
        )
        for name in ("q", "plain")
    )
    assert torch.equal(a.q, b.q)
