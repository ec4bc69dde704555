"""Logits of the text model beside NVIDIA NeMo-Automodel's, on random checkpoints in the released
FP8/FP4 layout that each side reads by itself.

A value that lies on a rounding boundary is rounded differently by two implementations whose float32
sums differ in the last bit, and one such flip moves the logits of a random model by up to 1. So the
tight comparison is made without cache rounding, and with it once directly (median) and once with
each rounding result taken over from NeMo (maximum).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nemo
import pytest
import torch
from conftest import Record
from tiny_tokens import tokens
from torch import Tensor

from deepinfer_engine import load_model

SEEDS = range(6)
LENGTH = 160
CLOSE = 1e-4
"""Of logits of size 4 in float32; observed 1e-5."""

FORMATS = {"fp8": "fp8", "fp4": "nvfp4", "index_fp4": "mxfp4"}

Quantised = Callable[[int], Path]


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_without_cache_rounding(quantised: Quantised, record: Record, seed: int) -> None:
    ids = tokens(seed, LENGTH)
    with nemo.rounding(nemo.unrounded):
        theirs = nemo.logits(nemo.backbone(quantised(seed)), ids)
    ours, _ = load_model(quantised(seed), dtype="float32", cache_quant="none").prefill(ids)
    what = f"logits of {len(SEEDS)} models, {LENGTH} tokens, no cache rounding"
    assert record(what, ours, theirs)[0] < CLOSE


@pytest.mark.parametrize(
    "limit",
    [{"sliding_window": 512}, {"index_topk": 512}, {"candidate_source_layer_id": -1}],
    ids=["window", "topk", "candidates"],
)
def test_window_topk_and_candidates_bind_in_these_prompts(
    quantised: Quantised, limit: dict[str, int]
) -> None:
    """With a limit lifted NeMo's own logits move: the agreement above says something about it."""
    ids = tokens(0, LENGTH)
    with nemo.rounding(nemo.unrounded):
        bound = nemo.logits(nemo.backbone(quantised(0)), ids)
        free = nemo.logits(nemo.backbone(quantised(0), **limit), ids)
    assert (bound - free).abs().max() > 0.1


@pytest.mark.parametrize("length", [1, 2, 15, 17, 33])
def test_logits_of_short_prompts(quantised: Quantised, record: Record, length: int) -> None:
    ids = tokens(40 + length, length)
    with nemo.rounding(nemo.unrounded):
        theirs = nemo.logits(nemo.backbone(quantised(0)), ids)
    ours, _ = load_model(quantised(0), dtype="float32", cache_quant="none").prefill(ids)
    assert record("logits of prompts of 1 to 33 tokens", ours, theirs)[0] < CLOSE


def test_chunks_and_single_tokens_out_of_the_cache_give_the_logits_of_their_one_pass(
    quantised: Quantised, record: Record
) -> None:
    ids = tokens(0, 260)
    with nemo.rounding(nemo.unrounded):
        theirs = nemo.logits(nemo.backbone(quantised(0)), ids)
    model = load_model(quantised(0), dtype="float32", cache_quant="none")
    cache, rows = None, []
    for a, b in itertools.pairwise([0, 50, 51, 128, 181]):
        piece, cache = model.prefill(ids[a:b], cache=cache)
        rows.append(piece)
    assert cache is not None
    rows.extend(model.decode(cache, [token]) for token in ids[181:].tolist())
    what = "logits of 4 chunks and 79 single tokens, no cache rounding"
    assert record(what, torch.cat(rows), theirs)[0] < CLOSE


def test_logits_with_cache_rounding(quantised: Quantised, record: Record) -> None:
    """Over all prompts, because any one of them may hold an early flip."""
    ours, theirs = [], []
    for seed in SEEDS:
        ids = tokens(seed, LENGTH)
        theirs.append(nemo.logits(nemo.backbone(quantised(seed)), ids))
        ours.append(load_model(quantised(seed), dtype="float32").prefill(ids)[0])
    what = f"logits of {len(SEEDS)} models, {LENGTH} tokens, cache rounding"
    assert record(what, torch.cat(ours), torch.cat(theirs))[1] < CLOSE


def test_nemo_differs_from_itself_in_the_same_way(quantised: Quantised, record: Record) -> None:
    """The measure of the test above: NeMo's two attention back ends, same weights and prompts."""
    eager, sdpa = [], []
    for seed in SEEDS:
        ids = tokens(seed, LENGTH)
        eager.append(nemo.logits(nemo.backbone(quantised(seed)), ids))
        sdpa.append(nemo.logits(nemo.backbone(quantised(seed), attn="sdpa"), ids))
    what = "the same, its sdpa for our model"
    worst, median = record(what, torch.cat(sdpa), torch.cat(eager), "NeMo itself")
    assert worst > CLOSE > median


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_with_every_rounding_taken_from_nemo(
    quantised: Quantised, record: Record, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    made: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def noting(values: Tensor, *, format: str, block_size: int) -> Tensor:
        rounded = nemo.quantize_cache(values, format=format, block_size=block_size)
        made[format].append((values, rounded))
        return rounded

    ids = tokens(seed, LENGTH)
    with nemo.rounding(noting):
        theirs = nemo.logits(nemo.backbone(quantised(seed)), ids)

    apart: list[Tensor] = []
    flipped: list[Tensor] = []

    def taken(exact: Tensor, own: Tensor, name: str) -> Tensor:
        waiting = made[FORMATS[name]]
        if not waiting:
            return own  # keys of the draft rings, which NeMo's backbone does not make
        before, after = (t.reshape(own.shape) for t in waiting.pop(0))
        apart.append((exact - before).abs().flatten())
        flipped.append((own != after).flatten())
        return after

    model = load_model(quantised(seed), dtype="float32")
    ops = model._backbone.ops
    # The three operators of the model that round; the record's name is their last argument.
    query_key, norm_rope, alone = ops.mla_query_key, ops.norm_rope_quant, ops.fake_quant

    def keys_taken(*args: Any) -> tuple[Tensor, ...]:
        latent, q, own = query_key(*args)
        return latent, q, taken(query_key(*args[:-1], "raw")[2], own, args[-1])

    def index_taken(*args: Any) -> Tensor:
        return taken(norm_rope(*args[:-1], "raw"), norm_rope(*args), args[-1])

    monkeypatch.setattr(ops, "mla_query_key", keys_taken)
    monkeypatch.setattr(ops, "norm_rope_quant", index_taken)
    monkeypatch.setattr(ops, "fake_quant", lambda x, name: taken(x, alone(x, name), name))
    ours, _ = model.prefill(ids)
    assert not any(made.values()), "our pass rounded fewer values than NeMo's"
    what = f"logits of {len(SEEDS)} models, {LENGTH} tokens, each rounding NeMo's"
    assert record(what, ours, theirs)[0] < CLOSE
    assert torch.cat(apart).max() < CLOSE
    assert torch.cat(flipped).float().mean() < 1e-4


def test_logits_in_bfloat16_are_as_near_to_float32_as_theirs(
    quantised: Quantised, record: Record
) -> None:
    exact, ours, theirs = [], [], []
    with nemo.rounding(nemo.unrounded):
        for seed in SEEDS:
            ids = tokens(seed, LENGTH)
            exact.append(nemo.logits(nemo.backbone(quantised(seed)), ids))
            theirs.append(nemo.logits(nemo.backbone(quantised(seed), "bfloat16"), ids))
            rough = load_model(quantised(seed), dtype="bfloat16", cache_quant="none")
            ours.append(rough.prefill(ids)[0])
    reference = torch.cat(exact)
    what = "its bfloat16 for our model, beside its float32"
    _, their_error = record(what, torch.cat(theirs), reference, "NeMo itself")
    _, our_error = record("logits, our bfloat16 beside its float32", torch.cat(ours), reference)
    assert our_error < 1.25 * their_error
