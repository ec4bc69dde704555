"""Heads, ranks, windows, selections and n-gram rows as wide as the released ones, and a prompt in
which each of them binds; hidden size and depth are small.

Among this many scores two lie so close at the cut of a top-k that float32 sums order them either
way, so each selection is taken over from NeMo, and ours may differ from it by such pairs alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemo
import pytest
import torch
from conftest import Record
from quantised_checkpoint import write_quantised
from tiny_checkpoint import write_tiny
from tiny_tokens import tokens
from torch import Tensor

from deepinfer_engine import load_model
from deepinfer_kernels import ops as kernels

LENGTH = 1100
WIDE = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 80,
    "num_attention_heads": 8,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 320,
    "o_lora_rank": 128,
    "o_groups": 8,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "n_routed_experts": 12,
    "num_experts_per_tok": 6,
    "engram_layer_ids": [1],
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "dspark_target_layer_ids": [3, 4, 5],
    "max_position_embeddings": 2048,
}


def test_logits_at_the_released_head_sizes(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "float", seed=3, **WIDE)
    write_quantised(tmp_path / "float", tmp_path / "q", shards=2)
    ids = tokens(3, LENGTH)
    theirs = nemo.backbone(tmp_path / "q")
    chosen: list[Tensor] = []
    for layer in theirs.model.layers.values():
        if layer.attn.indexer is not None:
            layer.attn.indexer.register_forward_hook(
                lambda _, __, state: chosen.append(state.topk_indices[0])
            )
    with nemo.rounding(nemo.unrounded):
        expected = nemo.logits(theirs, ids)

    model = load_model(tmp_path / "q", dtype="float32", cache_quant="none")
    ops = model._backbone.ops
    select, moved = ops.index_topk, []

    def taken(*arguments: Any) -> tuple[Tensor, Tensor]:
        (own, kept), their = select(*arguments), chosen.pop(0)
        moved.append(_moved(_scores(*arguments), own, their))
        return their, kept

    monkeypatch.setattr(ops, "index_topk", taken)
    ours, _ = model.prefill(ids)
    assert not chosen, "our pass selected less often than NeMo's"
    assert sum(moved) < 10
    what = f"logits at released head sizes, {LENGTH} tokens, each selection NeMo's"
    assert record(what, ours, expected)[0] < 1e-4


def _scores(
    q: Tensor, w: Tensor, cache: Tensor, table: Tensor, first: Tensor, visible: Tensor,
    record: str, k: int, entries: int, block: int, blocks: int, within: Tensor | None,
) -> Tensor:  # fmt: skip
    """[n, m] of one sequence, by the operator of scores alone: -inf where a row may not choose.

    `index_topk`, whose arguments these are, keeps no scores that could be looked at.
    """
    assert first.tolist() == [0, len(q)]
    at = torch.arange(int(visible.max()))
    slots = table[0, at // entries] * entries + at % entries
    keys = kernels.kv_load(cache, slots, record, q.shape[2], q.dtype, entries)
    scores = kernels.index_logits(q[None], keys[None], w[None], visible[None])[0]
    if within is None:
        return scores
    return kernels.candidate_mask(scores, _marks(within, -(-len(at) // block)), block)


def _marks(ids: Tensor, width: int) -> Tensor:
    """bool [n, width]: true at the ids of each row, of which -1 is none."""
    marks = torch.zeros(len(ids), width + 1, dtype=torch.bool)
    return marks.scatter_(1, torch.where(ids < 0, width, ids), True)[:, :width]


def _moved(scores: Tensor, own: Tensor, their: Tensor) -> int:
    """Rows that select otherwise; where one does, by scores that are as good as equal."""
    a, b = (_marks(selection, scores.shape[1]) for selection in (own, their))
    rows = (a != b).any(1)
    worst_own = scores.masked_fill(~a, float("inf")).amin(1)
    worst_their = scores.masked_fill(~b, float("inf")).amin(1)
    largest = scores.masked_fill(~a, 0).abs().amax(1)
    assert ((worst_own - worst_their)[rows].abs() < 1e-5 * largest[rows]).all()
    return int(rows.sum())
