"""GGUF files: each tensor type beside the package `gguf`, a whole model beside its other form."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from dense_checkpoint import write_dense
from dense_gguf import write_gguf

from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.files import load_tokenizer
from deepinfer_engine.model.gguf_file import READABLE, opened
from deepinfer_engine.model.gguf_weights import decoded, gguf_name
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows

IDS = np.random.default_rng(0).integers(3, 320, 60)


@pytest.mark.parametrize("kind", READABLE)
def test_every_type_is_decoded_as_the_package_decodes_it(kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(1).integers(0, 256, (512 // block + 7) * nbytes, dtype=np.uint8)
    raw = raw & 0xBF  # no exponent of all ones: no NaN among the scales
    expected = gguf.quants.dequantize(raw, type_)
    got = decoded(raw.copy(), kind).to(torch.float32).numpy()
    np.testing.assert_array_equal(got.reshape(-1), expected.reshape(-1))


def logits(folder: Path) -> torch.Tensor:
    runner = build_runner(folder, dtype="float64", num_blocks=4, num_state_slots=1)
    return runner.model.forward([SequenceRows(IDS, 0, (), [1], 0)], None)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("llama", "llama"), ("llama-tied", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_a_file_gives_the_logits_of_the_directory(name: str, arch: str, tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "hf", name)
    file = write_gguf(tmp_path / "m.gguf", folder, arch)
    made = opened(file, tmp_path / "home")
    assert (logits(made) - logits(folder)).abs().max() < 1e-10
    ours, theirs = load_tokenizer(made), load_tokenizer(folder)
    text = "A w7 é</s>, 123"
    assert ours.encode(text).ids == theirs.encode(text).ids
    config = json.loads((made / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages[0].content }}"
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_quantised_file_gives_the_logits_of_its_values(kind: str, tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "hf", "llama")
    made = opened(write_gguf(tmp_path / "q.gguf", folder, "llama", kind), tmp_path / "home")
    apart = (logits(made) - logits(folder)).abs().max()
    assert 0 < apart < (0.2 if kind in ("F16", "BF16", "Q8_0") else 5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_matrices_stay_as_the_file_holds_them(kind: str, tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "hf", "llama-tied")
    made = opened(write_gguf(tmp_path / "q.gguf", folder, "llama", kind), tmp_path / "home")
    rows = [SequenceRows(IDS, 0, (), [1], 0)]
    by_form = {
        form: build_runner(made, num_blocks=4, num_state_slots=1, weights=form)
        for form in ("stored", "wide")
    }
    held = {k: sum(t.nbytes for t in r.dense_weights()) for k, r in by_form.items()}
    assert held["stored"] < 0.4 * held["wide"]
    stored, wide = (r.model.forward(rows, None) for r in by_form.values())
    assert not torch.equal(stored, wide)  # activations are rounded to 8 bits
    spread = wide.std()
    assert ((stored - wide).abs().mean() / spread) < 0.05
    alone = by_form["stored"].model.forward([SequenceRows(IDS[:7], 0, (), [2], 0)], None)
    assert torch.equal(alone, stored[:7])  # a row's product does not depend on its neighbours


def test_a_file_is_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", write_dense(tmp_path / "hf"), "llama")
    made = opened(file, tmp_path / "home")
    monkeypatch.setattr(gguf, "GGUFReader", None)
    assert opened(file, tmp_path / "home") == made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cut", "ends inside tensor|not a readable GGUF"),
        ("garbage", "not a readable GGUF file"),
        ("head", "not a readable GGUF file, or one cut short"),
        ("arch", "general.architecture is 'falcon'; these run here: llama"),
        ("kind", "holds tensors of type Q5_0; readable are F32"),
        ("model", "kind 'llama'.*tokenizer.json beside"),
        ("pre", "tokenizer.ggml.pre is 'unheard-of'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(
    change: str, said: str, tmp_path: Path
) -> None:
    folder, file = write_dense(tmp_path / "hf"), tmp_path / "m.gguf"
    if change == "garbage":
        file.write_bytes(b"GGUF" + bytes(range(200)))
    else:
        write_gguf(
            file, folder, "falcon" if change == "arch" else "llama",
            "Q5_0" if change == "kind" else "F32",
            **({"model": "llama"} if change == "model" else {}),
            **({"pre": "unheard-of"} if change == "pre" else {}),
        )  # fmt: skip
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-5000])
    if change == "head":
        file.write_bytes(file.read_bytes()[:8])
    with pytest.raises(CheckpointError, match=said):
        opened(file, tmp_path / "home")
    assert not (tmp_path / "home").exists() or not list((tmp_path / "home").iterdir())


def test_a_tokenizer_beside_the_file_goes_first(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "hf")
    file = write_gguf(tmp_path / "m.gguf", folder, "llama", model="llama")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    made = opened(file, tmp_path / "home")
    assert (made / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


def test_names_of_tensors() -> None:
    assert gguf_name("layers.12.self_attn.o_proj.weight") == "blk.12.attn_output.weight"
    assert gguf_name("lm_head.weight") == "output.weight"
