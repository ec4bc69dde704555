"""Checkpoints in the released quantised layout: same numbers as their values written out in bf16,
and every damage named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_checkpoint import QUANTIZATION, write_quantised
from safetensors.torch import load_file, save_file

from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.quantised import decode_fp4_rows, decode_fp8_blocks
from deepinfer_engine.model.rows import RowTable, StoredRows
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.batch import Batch


@pytest.fixture(scope="module")
def pair(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(quantised, the same values in bf16)."""
    home = tmp_path_factory.mktemp("quantised")
    write_quantised(tiny_dir, home / "q", home / "twin")
    return home / "q", home / "twin"


def logits(path: Path, dtype: str) -> torch.Tensor:
    runner = build_runner(path, dtype=dtype, num_blocks=4, num_state_slots=2)
    assert isinstance(runner, TorchRunner)
    ids = np.random.default_rng(3).integers(4, 320, size=150)
    batch = Batch(runner.model._text, [SequenceRows(ids, 0, (), [1, 2], 1)])
    return runner.model._backbone.forward(batch, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_quantised_weights_give_the_logits_of_the_values_they_stand_for(
    pair: tuple[Path, Path], dtype: str
) -> None:
    quantised, twin = pair
    assert torch.equal(logits(quantised, dtype), logits(twin, dtype))


@pytest.mark.parametrize(("prefix", "shards"), [("model.", 1), ("", 3), ("model.", 4)])
def test_shards_and_prefix_change_nothing(
    tiny_dir: Path, pair: tuple[Path, Path], tmp_path: Path, prefix: str, shards: int
) -> None:
    write_quantised(tiny_dir, tmp_path / "m", prefix=prefix, shards=shards)
    assert torch.equal(logits(tmp_path / "m", "float32"), logits(pair[0], "float32"))


def damaged(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    shutil.copytree(pair[0], tmp_path / "m")
    return tmp_path / "m", load_file(pair[0] / "model.safetensors")


EXPERT = "layers.3.ffn.experts.5.w2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{EXPERT}.weight": None}, rf"tensor {EXPERT}\.weight is missing"),
        ({f"{EXPERT}.scale": None}, rf"tensor {EXPERT}\.scale is missing"),
        (
            {f"{EXPERT}.weight": torch.zeros(64, 32, dtype=torch.int8)},
            r"w2\.weight has shape \[64, 32\], the config asks for \[64, 16\]",
        ),
        (
            {"layers.0.attn.wkv.weight": torch.zeros(64, 64, dtype=torch.bfloat16)},
            r"layers\.0\.attn\.wkv\.weight is stored as BF16, expected F8_E4M3",
        ),
        (
            {"layers.0.attn.wkv.scale": torch.zeros(2, 2)},
            r"layers\.0\.attn\.wkv\.scale is stored as F32, expected F8_E8M0",
        ),
        ({"layers.0.attn.wkv.zero": torch.zeros(1)}, r"no use for, first layers\.0\.attn\.wkv\.z"),
    ],
)
def test_each_damage_is_one_line_that_names_the_tensor(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path, tensors = damaged(pair, tmp_path)
    tensors.update(change)
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as raised:
        build_runner(path, num_blocks=2, num_state_slots=2)
    assert "\n" not in str(raised.value)


def test_a_truncated_shard_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    write_quantised(tiny_dir, tmp_path / "m", shards=2)
    shard = tmp_path / "m" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: not a readable"):
        build_runner(tmp_path / "m", num_blocks=2, num_state_slots=2)


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "awq"},
        {"weight_block_size": [128, 128]},
        {"scale_fmt": "float32"},
        {"expert_dtype": "fp8"},
        {"activation_scheme": "static"},
        {"modules_to_not_convert": ["head"]},
    ],
)
def test_another_quantisation_is_refused_by_key(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    path, _ = damaged(pair, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {**QUANTIZATION, **change}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{next(iter(change))}"):
        build_runner(path, num_blocks=2, num_state_slots=2)


@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_fp8_blocks_decode_as_their_definition_says(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # the two NaN codes
    exponents = rng.integers(100, 150, (-(-rows // 32), -(-columns // 32)), dtype=np.uint8)
    got = decode_fp8_blocks(
        torch.from_numpy(codes).view(torch.float8_e4m3fn),
        torch.from_numpy(exponents).view(torch.float8_e8m0fnu),
        torch.float64,
    )
    for r in range(0, rows, 7):
        for c in range(0, columns, 5):
            scale = 2.0 ** (int(exponents[r // 32, c // 32]) - 127)
            assert got[r, c].item() == e4m3(int(codes[r, c])) * scale


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def test_fp4_takes_the_even_column_from_the_low_nibble() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0], packed[0, 1] = 0x21, 0xF9  # .5 1 | -.5 -6
    scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = decode_fp4_rows(packed.view(torch.int8), scale, torch.float32)
    assert got[0, :5].tolist() == [1.0, 2.0, -1.0, -12.0, 0.0]


def test_a_row_table_reads_rows_far_into_a_sparse_file(tmp_path: Path) -> None:
    """300 GB of rows on a file that holds two pages: reading needs no memory for the rest."""
    rows, dim = 1_200_000_000, 256
    path = tmp_path / "table"
    with path.open("wb") as file:
        file.truncate(rows * dim + 16)
        file.seek(16 + 1_100_000_000 * dim)
        file.write(bytes(range(dim)))
    table = RowTable(StoredRows(path, 16, rows, dim, torch.float8_e4m3fn), None, torch.float32)
    got = table.take(torch.tensor([[1_100_000_000, 3]]))
    assert len(table) == rows
    assert got.shape == (1, 2, dim)
    assert got[0, 0, :127].tolist() == [e4m3(code) for code in range(127)]
    assert not got[0, 1].any()
