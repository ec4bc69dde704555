"""Pictures in the model: the tower against a plain one, image prompts against the dense twin, and
every way of cutting and batching a prompt."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import plain_vision
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepinfer_engine import load_model
from deepinfer_engine.core.pictures import (
    Picture,
    PictureRules,
    overlapping,
    picture_digest,
    place,
    text_only,
)
from deepinfer_engine.errors import CheckpointError, RequestError
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.backbone import Backbone
from deepinfer_engine.model.v41.batch import Batch
from deepinfer_engine.model.v41.config import load_config
from deepinfer_engine.model.v41.replay import Replay
from deepinfer_engine.model.vision.tower import VisionTower

TOLERANCE = 1e-10
RULES = PictureRules(0, 14, 3, 64)


def pixels(seed: int, width: int, height: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, 3 * width * height, np.uint8).tobytes()


def prompt(
    model: TorchRunner, *sizes: tuple[int, int], text: int = 40, seed: int = 0
) -> tuple[np.ndarray, tuple[Picture, ...]]:
    """Random text with pictures of these sizes between."""
    rules = model.caps.pictures
    assert rules is not None
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in sizes:
        words = rng.integers(4, 320, text).tolist()
        ids += [w if w != rules.image_token_id else 5 for w in words] + [rules.image_token_id]
    ids += [w if w != rules.image_token_id else 5 for w in rng.integers(4, 320, text).tolist()]
    images = [(w, h, pixels(seed + i, w, h)) for i, (w, h) in enumerate(sizes)]
    token_ids, pictures = place(ids, images, rules)
    return np.array(token_ids), pictures


def rows(
    model: TorchRunner,
    ids: np.ndarray,
    pictures: tuple[Picture, ...],
    start: int,
    end: int,
    slot: int = 1,
    blocks: tuple[int, ...] = (2, 3, 4),
) -> SequenceRows:
    assert model.model._tower is not None
    images = []
    for p in overlapping(pictures, start, end):
        low, high = max(p.start, start), min(p.end, end)
        images.append((low - start, model.model._tower.span(p)[low - p.start : high - p.start]))
    first = max(0, start - 3)
    lookback = text_only(ids[first:start].tolist(), first, pictures)
    return SequenceRows(ids[start:end], start, lookback, blocks, slot, images=tuple(images))


def feed(model: TorchRunner, *sequences: SequenceRows) -> list[torch.Tensor]:
    batch = Batch(model.model._text, list(sequences))
    logits = model.model._backbone.forward(batch, None)
    return list(logits.split([len(s.token_ids) for s in sequences]))


def replayed(
    model: TorchRunner, ids: np.ndarray, pictures: tuple[Picture, ...], mode: str, edges: list[int]
) -> torch.Tensor:
    """The last row's logits after bounded replay of the prompt in chunks."""
    replay = Replay.of(model.model._text, mode, keep=40)
    backbone = Backbone(
        model.model._text,
        model.model._backbone.weights,
        model.model._pools,
        model.model._backbone._engram,
        replay,
    )
    model.clear_state(1)
    for a, b in itertools.pairwise(edges):
        fed = replace(rows(model, ids, pictures, a, b), replay_from=replay.start(len(ids)))
        logits = backbone.forward(Batch(model.model._text, [fed]), torch.tensor([b - a - 1]))
    return logits[-1]


def runner(path: Path, dtype: str = "float64") -> TorchRunner:
    return build_runner(path, dtype=dtype, num_blocks=14, num_state_slots=6)


@pytest.fixture(scope="module")
def model(vision_dir: Path) -> TorchRunner:
    return runner(vision_dir)


@pytest.fixture(scope="module")
def stored(vision_dir: Path) -> dict[str, torch.Tensor]:
    return {k: v.double() for k, v in load_file(vision_dir / "model.safetensors").items()}


@pytest.mark.parametrize("size", [(14, 14), (42, 42), (56, 98), (14, 280), (126, 70)])
def test_the_tower_equals_a_plain_one(
    model: TorchRunner, vision_dir: Path, stored: dict[str, torch.Tensor], size: tuple[int, int]
) -> None:
    config = json.loads((vision_dir / "config.json").read_text())["vision_config"]
    width, height = size
    image = torch.frombuffer(bytearray(pixels(7, *size)), dtype=torch.uint8).view(height, width, 3)
    assert model.model._tower is not None
    got = model.model._tower.encode(image)
    assert len(got) == RULES.tokens(width, height)
    assert (got - plain_vision.span(stored, config, image)).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def text_twin(vision_dir: Path, twin: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The dense twin with this checkpoint's text weights."""
    folder = tmp_path_factory.mktemp("text-only")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(vision_dir / name, folder)
    text = {
        name: tensor
        for name, tensor in load_file(vision_dir / "model.safetensors").items()
        if not name.startswith(("vision.", "aligner.", "image_"))
    }
    save_file(text, folder / "model.safetensors")
    return twin.load_twin(folder, torch.float64)


def twin_logits(
    twin: Any, stored: dict, config: dict, ids: np.ndarray, pictures: tuple[Picture, ...]
) -> torch.Tensor:
    """What the twin says of a prompt with pictures, each of their four effects put in by hand."""
    token_ids = torch.from_numpy(ids)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    embedded = twin.embed(token_ids).clone()
    for p in pictures:
        image = torch.frombuffer(bytearray(p.pixels), dtype=torch.uint8)
        mask[p.start : p.end] = True
        embedded[p.start : p.end] = plain_vision.span(
            stored, config, image.view(p.height, p.width, 3)
        )

    def masked_rows(self: Any, _: torch.Tensor) -> torch.Tensor:
        pad = self.compressed_ids[self.cfg.engram_pad_token_id]
        out = []
        for t in range(len(ids)):
            grams, broken = [], False
            for back in range(self.cfg.engram_max_ngram_size):
                broken = broken or t - back < 0 or bool(mask[t - back])
                grams.append(pad if broken else self.compressed_ids[token_ids[t - back]])
            mixed = grams[0] * self.multipliers[0]
            columns = []
            for i in range(1, len(grams)):
                mixed = mixed ^ (grams[i] * self.multipliers[i])
                columns.append(mixed % self.primes[i - 1] + self.offsets[i - 1])
            out.append(torch.cat(columns))
        return torch.stack(out)[None]

    hooks = [twin.embed.register_forward_hook(lambda *_: embedded[None])]
    engrams = [layer.engram for layer in twin.layers if hasattr(layer, "engram")]
    gates = [layer.ffn.gate for layer in twin.layers]
    text_biases = [gate.bias for gate in gates]
    for gate in gates:
        gate.bias = torch.where(mask[:, None], gate.bias_vl, gate.bias)
    for engram in engrams:
        engram.rows = MethodType(masked_rows, engram)
        hooks.append(
            engram.register_forward_hook(
                lambda _, given, out: torch.where(mask[None, :, None, None], given[0], out)
            )
        )
    try:
        with torch.no_grad():
            return twin(token_ids[None])[0]
    finally:
        for hook in hooks:
            hook.remove()
        for engram in engrams:
            del engram.rows
        for gate, bias in zip(gates, text_biases, strict=True):
            gate.bias = bias


@pytest.mark.parametrize("sizes", [((126, 112),), ((42, 42), (140, 98)), ((280, 14), (14, 14))])
def test_logits_of_an_image_prompt_equal_the_dense_twin(
    vision_dir: Path, text_twin: Any, stored: dict, model: TorchRunner, sizes: tuple
) -> None:
    config = json.loads((vision_dir / "config.json").read_text())["vision_config"]
    ids, pictures = prompt(model, *sizes, text=45)
    got = feed(model, rows(model, ids, pictures, 0, len(ids)))[0]
    expected = twin_logits(text_twin, stored, config, ids, pictures)
    assert (got - expected).abs().max() < TOLERANCE


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 140), max_size=8))
def test_any_chunking_of_an_image_prompt_equals_one_pass(
    model: TorchRunner, cuts: list[int]
) -> None:
    ids, pictures = prompt(model, (126, 112), (42, 42), text=35)
    whole = feed(model, rows(model, ids, pictures, 0, len(ids), slot=2, blocks=(5, 6, 7)))[0]
    model.clear_state(1)
    edges = sorted({0, *(c for c in cuts if c < len(ids)), len(ids)})
    pieces = [
        feed(model, rows(model, ids, pictures, a, b))[0] for a, b in itertools.pairwise(edges)
    ]
    assert (torch.cat(pieces) - whole).abs().max() < TOLERANCE


def test_token_by_token_across_a_span_equals_one_pass(model: TorchRunner) -> None:
    ids, pictures = prompt(model, (84, 84), text=20)
    whole = feed(model, rows(model, ids, pictures, 0, len(ids), slot=2, blocks=(5, 6, 7)))[0]
    pieces = [feed(model, rows(model, ids, pictures, i, i + 1))[0] for i in range(len(ids))]
    assert (torch.cat(pieces) - whole).abs().max() < TOLERANCE


@pytest.mark.parametrize("edges", [(0, 80, 128), (0, 40, 79, 82, 128), (0, 128)])
def test_bounded_replay_keeps_apart_what_is_picture_and_what_is_text(
    model: TorchRunner, edges: tuple[int, ...]
) -> None:
    """Rows that replay drops may end inside a span: dropping them is hiding their window keys."""
    ids, pictures = prompt(model, (42, 42), (126, 112), text=35)
    cuts = [*edges[:-1], len(ids)]
    assert any(p.start < len(ids) - 40 < p.end for p in pictures)
    compact, mask = (replayed(model, ids, pictures, mode, cuts) for mode in ("compact", "mask"))
    assert (compact - mask).abs().max() < TOLERANCE


def test_pictures_and_text_share_a_batch(model: TorchRunner) -> None:
    ids, pictures = prompt(model, (126, 112), text=30)
    other, _ = prompt(model, text=50, seed=3)
    alone = [
        feed(model, rows(model, ids, pictures, 0, len(ids)))[0],
        feed(model, rows(model, other, (), 0, len(other)))[0],
    ]
    together = feed(
        model,
        rows(model, other, (), 0, len(other), slot=2, blocks=(5,)),
        rows(model, ids, pictures, 0, len(ids), slot=3, blocks=(8, 9, 10)),
    )
    assert (together[0] - alone[1]).abs().max() < TOLERANCE
    assert (together[1] - alone[0]).abs().max() < TOLERANCE


def test_the_placeholder_of_a_picture_has_no_meaning_of_its_own(model: TorchRunner) -> None:
    ids, pictures = prompt(model, (126, 112), text=30)
    named = ids.copy()
    named[pictures[0].start : pictures[0].end] = 17
    one, two = (feed(model, rows(model, x, pictures, 0, len(x)))[0] for x in (ids, named))
    assert torch.equal(one, two)


def test_the_model_as_a_library_takes_pictures_in_chunks(
    model: TorchRunner, vision_dir: Path
) -> None:
    ids, (picture,) = prompt(model, (126, 112), text=3)
    whole = feed(model, rows(model, ids, (picture,), 0, len(ids)))[0]
    library = load_model(vision_dir, dtype="float64")
    image = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).view(112, 126, 3)
    span = library.encode_image(image)
    logits, held = library.prefill(ids, images=[(3, span)])
    assert (logits - whole).abs().max() < TOLERANCE
    logits, held = library.prefill(ids[:10], images=[(3, span[:7])])
    rest, held = library.prefill(ids[10:-2], cache=held, images=[(0, span[7:])])
    # The look-back of the last words reaches into the span.
    last = library.decode(held, ids[-2:])
    assert (torch.cat([logits, rest, last]) - whole).abs().max() < TOLERANCE
    held.truncate(len(ids) - 1)
    assert (library.decode(held, ids[-1:]) - whole[-1]).abs().max() < TOLERANCE


def test_the_library_refuses_embeddings_that_do_not_fit(vision_dir: Path, tiny_dir: Path) -> None:
    library = load_model(vision_dir, dtype="float32")
    span = library.encode_image(torch.zeros(42, 42, 3, dtype=torch.uint8))
    ids = [5] * 12
    for images, words in [
        ([(10, span)], "in order and apart"),
        ([(4, span), (6, span)], "in order and apart"),
        ([(0, span.double())], "got .* of torch.float64"),
        ([(0, span[:, :5])], r"\[k, 64\]"),
    ]:
        with pytest.raises(RequestError, match=words):
            library.prefill(ids, images=images)
    for pixels in (torch.zeros(42, 43, 3, dtype=torch.uint8), torch.zeros(42, 42, 3)):
        with pytest.raises(RequestError, match="multiples of 14"):
            library.encode_image(pixels)
    text = load_model(tiny_dir, dtype="float32")
    for call in (lambda: text.prefill(ids, images=[(0, span)]), lambda: text.encode_image(span)):
        with pytest.raises(RequestError, match="no vision tower"):
            call()


def test_a_lost_window_with_a_picture_cannot_run_again(vision_dir: Path) -> None:
    library = load_model(vision_dir, dtype="float32")
    span = library.encode_image(torch.zeros(42, 42, 3, dtype=torch.uint8))
    _, held = library.prefill([5] * 128, images=[(120, span)])
    moved = library.new_cache()
    moved.import_blocks(held.export_blocks(), held.tokens, held.is_image)
    with pytest.raises(RequestError, match="a picture in its last window"):
        library.decode(moved, [7])
    moved.import_state(held.export_state())
    assert torch.equal(library.decode(moved, [7]), library.decode(held, [7]))


def test_float32_and_bfloat16_run(vision_dir: Path, model: TorchRunner) -> None:
    ids, pictures = prompt(model, (126, 112), text=30)
    exact = feed(model, rows(model, ids, pictures, 0, len(ids)))[0]
    single = runner(vision_dir, "float32")
    near = feed(single, rows(single, ids, pictures, 0, len(ids)))[0]
    assert (near - exact).abs().median() < 1e-4
    half = runner(vision_dir, "bfloat16")
    assert feed(half, rows(half, ids, pictures, 0, len(ids)))[0].isfinite().all()


def test_the_tower_runs_once_for_the_chunks_and_repeats_of_a_picture(
    vision_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = runner(vision_dir)
    assert model.model._tower is not None
    calls: list[int] = []
    encode = VisionTower.encode

    def counted(self: VisionTower, image: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return encode(self, image)

    monkeypatch.setattr(VisionTower, "encode", counted)
    monkeypatch.setattr("deepinfer_engine.model.vision.tower.CACHED_TOKENS", 30)
    small = [
        Picture(0, 11, 84, 84, picture_digest(84, 84, data), data)
        for data in (pixels(s, 84, 84) for s in range(5))
    ]
    for picture in (small[0], small[0], small[1], small[0]):
        model.model._tower.span(picture)
    assert len(calls) == 2
    for picture in small:
        model.model._tower.span(picture)
    assert len(calls) == 2 + 3
    assert len(model.model._tower._cache) <= 30 // 8
    model.model._tower.span(small[1])
    assert len(calls) == 2 + 3 + 1


def test_missing_and_misshapen_vision_tensors_are_named(vision_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(vision_dir, folder)
    good = load_file(folder / "model.safetensors")

    def rejected(tensors: dict[str, torch.Tensor], words: str) -> None:
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            runner(folder)

    for name in (
        "vision.blocks.1.attn.wqkv.bias",
        "image_newline",
        "aligner.w2.weight",
        "layers.3.ffn.gate.bias_vl",
    ):
        rejected({k: v for k, v in good.items() if k != name}, f"{name} is missing")
    rejected(
        {**good, "vision.patch_embed.proj.weight": torch.ones(64, 3)},
        r"proj\.weight has shape \[64, 3\], the config asks for \[64, 588\]",
    )
    rejected({**good, "vision.blocks.2.norm1.weight": torch.ones(64)}, "no use for, first vision")


def test_text_alone_may_be_served_without_the_tower(vision_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(vision_dir, folder)
    text = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith(("vision.", "aligner.", "image_")) and "bias_vl" not in name
    }
    save_file(text, folder / "model.safetensors")
    model = build_runner(folder, num_blocks=4, num_state_slots=3, vision=False)
    assert model.caps.pictures is None
    assert model.model._backbone.weights.vision is None


@pytest.mark.parametrize("token", [None, -1, 320])
def test_a_tower_without_an_image_token_is_refused(
    vision_dir: Path, tmp_path: Path, token: int | None
) -> None:
    config = json.loads((vision_dir / "config.json").read_text())
    config["image_token_id"] = token
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="image_token_id"):
        load_config(tmp_path)
