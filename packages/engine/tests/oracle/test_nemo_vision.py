"""Pictures beside NeMo's: patches, tower and projector, and logits of prompts with pictures.

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

from deepinfer_engine.backend.torch import TorchRunner, build_runner
from deepinfer_engine.core.pictures import Picture, overlapping, place, text_only
from deepinfer_engine.model.batch import Batch, SequenceRows

Quantised = Callable[..., Path]
SIZES = [(84, 84), (126, 56), (56, 126), (98, 154), (112, 70)]
"""(width, height): whole cells and cells over the edge, wide and tall."""


def drawn(seed: int, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def prompt(
    model: TorchRunner, sizes: list[tuple[int, int]], text: int
) -> tuple[np.ndarray, tuple[Picture, ...]]:
    """`text` random tokens before, between and after pictures of these sizes."""
    rules, rng = model.caps.pictures, np.random.default_rng(11)
    assert rules is not None
    words = [t for t in range(4, 320) if t != rules.image_token_id]
    ids: list[int] = []
    for _ in sizes:
        ids += [*rng.choice(words, text).tolist(), rules.image_token_id]
    ids += rng.choice(words, text).tolist()
    images = [(w, h, drawn(i, w, h).tobytes()) for i, (w, h) in enumerate(sizes)]
    token_ids, pictures = place(ids, images, rules)
    return np.array(token_ids), pictures


def our_logits(
    model: TorchRunner, ids: np.ndarray, pictures: tuple[Picture, ...], cuts: list[int]
) -> Tensor:
    """Of the whole prompt, fed in pieces that end at `cuts`."""
    assert model._tower is not None
    out = []
    for start, end in itertools.pairwise([0, *cuts, len(ids)]):
        images = []
        for p in overlapping(pictures, start, end):
            low, high = max(p.start, start), min(p.end, end)
            part = model._tower.span(p)[low - p.start : high - p.start]
            images.append((low - start, part))
        first = max(0, start - model.caps.lookback)
        before = text_only(ids[first:start].tolist(), first, pictures)
        rows = SequenceRows(ids[start:end], start, before, [2, 3, 4], 1, images=tuple(images))
        out.append(model._backbone.forward(Batch(model._config, [rows]), None))
    return torch.cat(out)


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
def path(quantised: Quantised) -> Path:
    return quantised(7, vision=True)


def runner(path: Path, quant: Any = "none") -> TorchRunner:
    return build_runner(path, dtype="float32", num_blocks=6, num_state_slots=2, cache_quant=quant)


@pytest.mark.parametrize("size", SIZES)
def test_embeddings_of_a_picture(path: Path, record: Record, size: tuple[int, int]) -> None:
    ours, theirs = runner(path), nemo.backbone(path)
    ids, (picture,) = prompt(ours, [size], text=3)
    with torch.no_grad():
        inputs = their_inputs(theirs, ids, [size])
        patches = inputs["pixel_values"].float()
        rows, columns = inputs["image_grid_hws"][0].tolist()
        states = theirs.model.vision(patches, rows, columns)
        whole = theirs.model._image_embeddings(torch.from_numpy(ids)[None], **inputs)[0]
    assert ours._tower is not None
    pixels = torch.from_numpy(drawn(0, *size))
    our_patches, *grid = ours._tower._patches(pixels)
    assert grid == [rows, columns]
    assert torch.equal(our_patches, patches.flatten(1)), "patches are the same numbers"
    our_states = ours._tower._tower(our_patches, rows, columns)
    assert record("patch states of the vision tower", our_states, states)[0] < 1e-4
    span = whole[picture.start : picture.end]
    what = "embeddings of a picture's tokens"
    assert record(what, ours._tower.span(picture), span)[0] < 1e-4


@pytest.mark.parametrize("cuts", [[], [20, 28, 29, 30, 90, 128]], ids=["one pass", "cut"])
def test_logits_of_a_prompt_with_pictures(path: Path, record: Record, cuts: list[int]) -> None:
    ours, theirs = runner(path), nemo.backbone(path)
    ids, pictures = prompt(ours, SIZES, text=24)
    assert len(ids) > 150
    assert pictures[0].start < 28 < 30 < pictures[0].end, "cuts go through a picture"
    inputs = their_inputs(theirs, ids, SIZES)
    with nemo.rounding(nemo.unrounded):
        expected = nemo.logits(theirs, ids, **inputs)
    got = our_logits(ours, ids, pictures, cuts)
    what = f"logits, {len(ids)} tokens with {len(SIZES)} pictures, no cache rounding"
    assert record(what, got, expected)[0] < 1e-4


def test_logits_of_a_prompt_with_pictures_and_cache_rounding(path: Path, record: Record) -> None:
    ours, theirs = runner(path, "reference"), nemo.backbone(path)
    ids, pictures = prompt(ours, SIZES, text=24)
    expected = nemo.logits(theirs, ids, **their_inputs(theirs, ids, SIZES))
    what = f"logits, {len(ids)} tokens with {len(SIZES)} pictures, cache rounding"
    assert record(what, our_logits(ours, ids, pictures, []), expected)[1] < 1e-4


def test_the_image_bias_of_the_experts_counts_in_these_prompts(path: Path) -> None:
    """With NeMo's own image bias shifted its logits move: equal logits say something about it."""
    ours, theirs = runner(path), nemo.backbone(path)
    ids, _ = prompt(ours, SIZES, text=24)
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
