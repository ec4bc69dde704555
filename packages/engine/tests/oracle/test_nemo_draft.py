"""The draft module beside NeMo's: greedy drafts, logits, states, confidences.

NeMo trains its confidence head on the normed state, the released heads read the state before the
norm: NeMo's head is fed the state that ours reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nemo
import pytest
import torch
from conftest import Record
from tiny_tokens import tokens
from torch import Tensor

from deepinfer_engine import load_model
from deepinfer_engine.model.family import CacheQuant
from deepinfer_engine.model.v41.draft import DraftBlock, Drafter

Quantised = Callable[[int], Path]
SEEDS = range(4)
RESIDENT = (3, 17, 40, 150)
"""Tokens before the anchor: less than a window, about one, more, more than a block."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same draft block of both."""

    ours: DraftBlock
    hidden: Tensor
    theirs: nemo.Drafted


@pytest.fixture
def drafted(
    quantised: Quantised, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, int, CacheQuant], Pair]:
    states: list[Tensor] = []
    decode = Drafter._decode

    def noting(self: Drafter, anchors: Tensor, hidden: Tensor, pick) -> DraftBlock:
        states.append(hidden[0])
        return decode(self, anchors, hidden, pick)

    monkeypatch.setattr(Drafter, "_decode", noting)

    def run(seed: int, resident: int, quant: CacheQuant) -> Pair:
        path, ids = quantised(seed), tokens(seed, resident + 1)
        anchor = int(ids[resident])
        with nemo.rounding(nemo.unrounded if quant == "none" else None):
            theirs = nemo.Drafted(nemo.backbone(path), nemo.drafter(path), ids[:resident], anchor)
        model = load_model(path, dtype="float32", cache_quant=quant)
        assert model._drafter is not None
        # A chunk, then single tokens: the context keys come from both.
        chunk = max(1, resident - 8)
        _, cache = model.prefill(ids[:chunk])
        for token in ids[chunk:resident].tolist():
            model.decode(cache, [token])
        ours = model._drafter.run(
            torch.tensor([anchor]),
            torch.tensor([cache.length]),
            torch.tensor([cache.slot]),
            model.config.text_config.dspark_block_size,
            lambda _, row: row.argmax(-1),
        )
        return Pair(ours, states.pop(), theirs)

    return run


@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_without_cache_rounding(
    drafted: Callable[[int, int, CacheQuant], Pair], record: Record, seed: int, resident: int
) -> None:
    pair = drafted(seed, resident, "none")
    assert torch.equal(pair.ours.tokens[0], pair.theirs.tokens)
    where = f"of {len(SEEDS) * len(RESIDENT)} draft blocks, no cache rounding"
    assert record(f"states {where}", pair.hidden, pair.theirs.hidden)[0] < 1e-4
    assert record(f"logits {where}", pair.ours.logits[0], pair.theirs.logits)[0] < 1e-4
    confidence = pair.ours.confidence[0]
    assert record(f"confidences {where}", confidence, pair.theirs.confidence)[0] < 1e-5
    # Which state the head reads is no detail: on the normed one NeMo's answers otherwise.
    assert (confidence - pair.theirs.confidence_normed).abs().max() > 1e-2


def test_drafts_with_cache_rounding(
    drafted: Callable[[int, int, CacheQuant], Pair], record: Record
) -> None:
    """Logits by the median, for a flipped rounding may lie before an anchor; equal tokens."""
    ours, theirs = [], []
    for seed in SEEDS:
        for resident in RESIDENT:
            pair = drafted(seed, resident, "reference")
            assert torch.equal(pair.ours.tokens[0], pair.theirs.tokens)
            ours.append(pair.ours.logits[0])
            theirs.append(pair.theirs.logits)
    what = f"logits of {len(ours)} draft blocks, cache rounding"
    assert record(what, torch.cat(ours), torch.cat(theirs))[1] < 1e-4
