"""Configs and checkpoints: what is refused, with which words; and the constants of the released
layout."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_engine.errors import CheckpointError, ConfigError
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.model.v41.config import ModelConfig, load_config
from deepinfer_engine.model.v41.engram import multipliers, table_primes


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_dir, tmp_path / "m")
    return tmp_path / "m"


def load(path: Path) -> object:
    return build_runner(path, num_blocks=2, num_state_slots=2)


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        part = (
            config
            if key in ("dtype", "architectures", "quantization_config")
            else config["text_config"]
        )
        part[key] = value
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"compress_ratios": [0, 1]}, "compress_ratios has 2 entries"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 4, 0, 0]}, "0, 1 and 2"),
        ({"kv_source_layer_ids": [2, 4]}, "must be a KV source|would read kv source"),
        ({"index_source_layer_ids": [4, 6]}, "kv_source_layer_ids"),
        ({"candidate_source_layer_id": 5}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 4}, "must share one compress ratio"),
        ({"index_k_source_layer_ids": [2, 4, 6, 8]}, "index_k_source_layer_ids must equal"),
        ({"dtype": "float16"}, "dtype"),
        ({"architectures": ["Other"]}, "architectures"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"head_dim": 48}, "multiples of 32"),
        ({"vocab_size": "many"}, "vocab_size.*many"),
        ({"num_experts_per_tok": 100}, "num_experts_per_tok is 100"),
        ({"n_routed_experts": 10**9}, "n_routed_experts"),
        ({"dspark_num_experts_per_tok": 10**6}, "dspark_num_experts_per_tok"),
    ],
)
def test_an_unusable_config_is_refused_by_name(
    copy: Path, changes: dict[str, Any], words: str
) -> None:
    edit(copy, **changes)
    with pytest.raises(CheckpointError, match=words):
        load(copy)


def test_missing_and_broken_files_are_named(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model directory"):
        load(tmp_path / "nowhere")
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable"):
        load(copy)
    weights.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(copy)
    weights.write_bytes(whole)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        load(copy)


@pytest.mark.parametrize("name", ["", "..", "../m", 5, None, "x" * 5000, "a\0b"])
def test_an_index_names_files_of_its_directory_alone(copy: Path, name: object) -> None:
    index = {"weight_map": {"embed.weight": name}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"plain file name|shard\(s\) missing"):
        load(copy)


@pytest.mark.parametrize(
    "file",
    ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"],
)
def test_a_pipe_is_refused_and_not_waited_for(copy: Path, file: str) -> None:
    (copy / file).unlink(missing_ok=True)
    os.mkfifo(copy / file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(copy)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_nested_too_deeply_is_refused(copy: Path, file: str) -> None:
    (copy / file).write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load(copy)


def test_missing_misshapen_doubled_and_unknown_tensors_are_named(copy: Path) -> None:
    weights = copy / "model.safetensors"
    good = load_file(weights)

    def rejected(tensors: dict[str, torch.Tensor], words: str) -> None:
        save_file(tensors, weights)
        with pytest.raises(CheckpointError, match=words):
            load(copy)

    rejected(
        {k: v for k, v in good.items() if ".experts.3.w2" not in k},
        r"experts\.3\.w2\.weight is missing and 11 more",
    )
    rejected(
        {**good, "norm.weight": torch.ones(3)},
        r"norm\.weight has shape \[3\], the config asks for \[64\]",
    )
    rejected(
        {**good, "model.norm.weight": good["norm.weight"].clone()}, r"norm\.weight exists twice"
    )
    rejected(
        {**good, "layers.0.hc_attn_norm.weight": torch.ones(1)},
        r"no use for, first layers\.0\.hc_attn_norm",
    )
    rejected(
        {**good, "layers.0.hc_attn_base": good["layers.0.hc_attn_base"].bfloat16()},
        "stored as BF16",
    )


def test_shards_and_the_model_prefix_are_read(copy: Path) -> None:
    weights = copy / "model.safetensors"
    good = load_file(weights)
    weights.unlink()
    names = sorted(good)
    index: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({f"model.{n}": good[n] for n in part}, copy / shard)
        index.update({f"model.{n}": shard for n in part})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    load(copy)
    (copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 shard\(s\) missing: model-00002"):
        load(copy)


def test_a_tokenizer_that_is_not_the_models_is_refused(copy: Path) -> None:
    edit(copy, engram_compressed_vocab_size=100)
    with pytest.raises(CheckpointError, match="do not belong together"):
        load(copy)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"nextn": 6}, r"0\.\.5"),
        ({"cache_quant": "int8"}, "cache_quant"),
        ({"max_model_len": 10**9}, "max_model_len"),
    ],
)
def test_bad_arguments_are_refused(tiny_dir: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_runner(tiny_dir, num_blocks=2, num_state_slots=2, **arguments)


def test_engram_tables_of_the_released_model(tiny_dir: Path) -> None:
    root = json.loads((tiny_dir / "config.json").read_text())
    root["text_config"].update(
        num_hidden_layers=40,
        compress_ratios=[0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        num_nextn_predict_layers=3,
        kv_source_layer_ids=[2, 8, 14, 20],
        index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        candidate_source_layer_id=20,
        engram_layer_ids=[1, 14],
        engram_num_embeddings=[384006168, 384016682],
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
    )
    primes = table_primes(ModelConfig.model_validate(root).text_config)
    assert primes[0][0][:4] == [16000057, 16000079, 16000081, 16000097]
    assert primes[0][2][7] == 16000463
    assert primes[1][0][0] == 16000477
    assert [sum(map(sum, layer)) for layer in primes] == [384006168, 384016682]
    assert multipliers(1, 99092, 4).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert multipliers(14, 99092, 4).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


def test_the_demo_and_tiny_configs_say_what_they_own(tiny_dir: Path) -> None:
    config = load_config(tiny_dir).text_config
    assert config.n_producers == 6
    assert config.ring_slots == 16 + 6
    assert config.lookback == 3
