"""Pictures beside NeMo's: patches, tower and projector, logits and drafts of prompts with pictures.

The sizes are fixed points of NeMo's sizing, so that its own preprocessing turns the same pixels
into patches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nemo
import numpy as np
import pytest
import torch
from conftest import Record
from nemo_automodel.components.models.deepseek_v41.processing import _preprocess_image
from PIL import Image
from torch import Tensor

from deepinfer_engine import Cache, Model, load_model
from deepinfer_engine.core.pictures import Picture, overlapping, place
from deepinfer_engine.model.family import CacheQuant

SIZES = [(84, 84), (126, 56), (56, 126), (98, 154), (112, 70)]
"""(width, height): whole cells and cells over the edge, wide and tall."""

TEXT = 24
"""Tokens before, between and after the pictures."""


def drawn(seed: int, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def load(path: Path, quant: CacheQuant = "none") -> Model:
    return load_model(path, dtype="float32", cache_quant=quant)


def prompt(model: Model, sizes: list[tuple[int, int]]) -> tuple[np.ndarray, tuple[Picture, ...]]:
    """Random text with pictures of these sizes between."""
    rules, rng = model.config.picture_rules, np.random.default_rng(11)
    assert rules is not None
    words = [t for t in range(4, 320) if t != rules.image_token_id]
    ids: list[int] = []
    for _ in sizes:
        ids += [*rng.choice(words, TEXT).tolist(), rules.image_token_id]
    ids += rng.choice(words, TEXT).tolist()
    images = [(w, h, drawn(i, w, h).tobytes()) for i, (w, h) in enumerate(sizes)]
    token_ids, pictures = place(ids, images, rules)
    return np.array(token_ids), pictures


def prefill(
    model: Model, ids: np.ndarray, pictures: tuple[Picture, ...], cuts: list[int]
) -> tuple[Tensor, Cache]:
    """The prompt in pieces that end at `cuts`: its logits and the cache."""
    pixels = (torch.from_numpy(drawn(i, p.width, p.height)) for i, p in enumerate(pictures))
    spans = dict(zip(pictures, map(model.encode_image, pixels), strict=True))
    rows, cache = [], None
    for start, end in itertools.pairwise([0, *cuts, len(ids)]):
        images = []
        for p in overlapping(pictures, start, end):
            low, high = max(p.start, start), min(p.end, end)
            images.append((low - start, spans[p][low - p.start : high - p.start]))
        logits, cache = model.prefill(ids[start:end], cache=cache, images=images)
        rows.append(logits)
    assert cache is not None
    return torch.cat(rows), cache


def their_inputs(model: Any, ids: np.ndarray, sizes: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Patches, grids and token types as NeMo's processor makes them of the pictures."""
    patches, grids, spans = [], [], list[int]()
    for i, (width, height) in enumerate(sizes):
        image = Image.fromarray(drawn(i, width, height))
        own, grid = _preprocess_image(image, model.config.vision_config)
        assert (grid.width, grid.height) == (width, height), "not a fixed point of its sizing"
        patches.append(own)
        grids.append((grid.vit_height, grid.vit_width))
        spans += [0, *([1] * grid.llm_width + [2]) * grid.llm_height, 3]
    types = torch.full((1, len(ids)), -1)
    types[0, torch.from_numpy(ids == model.config.image_token_id)] = torch.tensor(spans)
    return {
        "pixel_values": torch.cat(patches),
        "image_grid_hws": torch.tensor(grids),
        "vision_token_types": types,
    }


@pytest.fixture(scope="module")
def path(quantised: Callable[..., Path]) -> Path:
    return quantised(7, vision=True)


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_a_picture(path: Path, record: Record, size: tuple[int, int]) -> None:
    ours, theirs = load(path), nemo.backbone(path)
    ids, (picture,) = prompt(ours, [size])
    inputs = their_inputs(theirs, ids, [size])
    patches = inputs["pixel_values"].float()
    rows, columns = inputs["image_grid_hws"][0].tolist()
    with torch.no_grad():
        states = theirs.model.vision(patches, rows, columns)
        whole = theirs.model._image_embeddings(torch.from_numpy(ids)[None], **inputs)[0]
    assert ours._tower is not None
    pixels = torch.from_numpy(drawn(0, *size))
    our_patches, *grid = ours._tower._patches(pixels)
    assert grid == [rows, columns]
    assert torch.equal(our_patches, patches.flatten(1)), "the same pixels, the same patches"
    with torch.inference_mode():
        our_states = ours._tower._tower(our_patches, [(rows, columns)])
    assert record("patch states of the vision tower", our_states, states)[0] < 1e-4
    span = whole[picture.start : picture.end]
    assert record("embeddings of a picture's tokens", ours.encode_image(pixels), span)[0] < 1e-4


@pytest.mark.parametrize("cuts", [[], [20, 28, 29, 30, 90, 128]], ids=["one pass", "cut"])
def test_logits_and_drafts_of_a_prompt_with_pictures(
    path: Path, record: Record, cuts: list[int]
) -> None:
    ours, theirs = load(path), nemo.backbone(path)
    ids, pictures = prompt(ours, SIZES)
    assert len(ids) > 150
    assert pictures[0].start < 28 < 30 < pictures[0].end, "cuts go through a picture"
    inputs = their_inputs(theirs, ids, SIZES)
    with nemo.rounding(nemo.unrounded):
        expected = nemo.logits(theirs, ids, **inputs)
        block = nemo.Drafted(theirs, nemo.drafter(path), ids, 55, **inputs)
    got, cache = prefill(ours, ids, pictures, cuts)
    what = f"logits, {len(ids)} tokens with {len(SIZES)} pictures, no cache rounding"
    assert record(what, got, expected)[0] < 1e-4
    proposal = ours.draft(cache, 55)
    assert proposal.tokens[0].tolist() == block.tokens.tolist()
    what = "draft confidences after the pictures"
    assert record(what, torch.from_numpy(proposal.conf[0]), block.confidence)[0] < 1e-5


def test_logits_of_a_prompt_with_pictures_and_cache_rounding(path: Path, record: Record) -> None:
    ours, theirs = load(path, "reference"), nemo.backbone(path)
    ids, pictures = prompt(ours, SIZES)
    expected = nemo.logits(theirs, ids, **their_inputs(theirs, ids, SIZES))
    what = f"logits, {len(ids)} tokens with {len(SIZES)} pictures, cache rounding"
    assert record(what, prefill(ours, ids, pictures, [])[0], expected)[1] < 1e-4


def test_the_image_bias_of_the_experts_counts_in_these_prompts(path: Path) -> None:
    """With NeMo's own image bias moved its logits move: equal logits say something about it."""
    theirs = nemo.backbone(path)
    ids, _ = prompt(load(path), SIZES)
    inputs = their_inputs(theirs, ids, SIZES)
    before = nemo.logits(theirs, ids, **inputs)
    gates = [layer.ffn.gate for layer in theirs.model.layers.values()]
    biases = [gate.bias_vl.clone() for gate in gates]
    try:
        for gate in gates:
            gate.bias_vl.copy_(gate.bias_vl.roll(1))
        assert (nemo.logits(theirs, ids, **inputs) - before).abs().max() > 0.1
    finally:
        for gate, bias in zip(gates, biases, strict=True):
            gate.bias_vl.copy_(bias)
