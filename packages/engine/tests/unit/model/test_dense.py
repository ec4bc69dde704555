"""The dense family beside a forward pass written out here, and against itself in every division of
the work. `nox -s oracle` runs the same checkpoints through transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_checkpoint import MODELS, write_dense
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_engine import LLM, CheckpointError, ConfigError, SamplingParams
from deepinfer_engine.model.dense.config import DenseConfig
from deepinfer_engine.model.registry import load_family_config
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows

LENGTH = 200


def plain_logits(folder: Path, ids: np.ndarray) -> Tensor:
    """[n, vocab] in float64: one sequence, one pass, a mask, no cache."""
    c = DenseConfig.model_validate(json.loads((folder / "config.json").read_text()))
    w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    heads, kv, d = c.num_attention_heads, c.kv_heads, c.head_width

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * w[name]

    def matrix(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    turns = plain_turns(c)[:, None] * torch.arange(len(ids), dtype=torch.float64)
    factor = 0.1 * math.log(c.rope_scaling.factor) + 1 if c.rope_kind == "yarn" else 1.0

    def rotate(x: Tensor) -> Tensor:
        as_complex = torch.complex(x[..., : d // 2], x[..., d // 2 :])
        turned = as_complex * torch.polar(torch.full_like(turns, factor), turns).T[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    x = w["model.embed_tokens.weight"][torch.from_numpy(ids)]
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (
            matrix(h, f"{p}self_attn.{n}_proj").view(len(ids), m, d)
            for n, m in (("q", heads), ("k", kv), ("v", kv))
        )
        if c.qk_norm:
            q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        scores += torch.full_like(scores[0], -math.inf).triu(1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
        x = x + matrix(out, p + "self_attn.o_proj")
        h = norm(x, p + "post_attention_layernorm.weight")
        gate = matrix(h, p + "mlp.gate_proj")
        x = x + matrix(gate * gate.sigmoid() * matrix(h, p + "mlp.up_proj"), p + "mlp.down_proj")
    head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
    return norm(x, "model.norm.weight") @ w[f"{head}.weight"].T


def plain_turns(c: DenseConfig) -> Tensor:
    """Turns per position of each channel pair, one pair at a time."""
    d, s, out = c.head_width, c.rope_scaling, []
    for pair in range(d // 2):
        turn = c.rope_theta ** (-2 * pair / d)
        if c.rope_kind == "linear":
            turn /= s.factor
        elif c.rope_kind == "llama3":
            wavelength = 2 * math.pi / turn
            fits = s.original_max_position_embeddings / wavelength
            if fits < s.low_freq_factor:
                turn /= s.factor
            elif fits <= s.high_freq_factor:
                mix = (fits - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                turn = (1 - mix) * turn / s.factor + mix * turn
        elif c.rope_kind == "yarn":
            low, high = (
                d
                * math.log(s.original_max_position_embeddings / (b * 2 * math.pi))
                / (2 * math.log(c.rope_theta))
                for b in (s.beta_fast, s.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
            ramp = min(max((pair - low) / (high - low), 0), 1)
            turn = turn / s.factor * ramp + turn * (1 - ramp)
        out.append(turn)
    return torch.tensor(out, dtype=torch.float64)


def runner_of(folder: Path, dtype: str = "float64", **options: Any) -> TorchRunner:
    return build_runner(folder, dtype=dtype, num_blocks=20, num_state_slots=1, **options)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 320, n)


def fed(ids: np.ndarray, start: int, end: int, table: list[int]) -> SequenceRows:
    return SequenceRows(ids[start:end], start, (), table, 0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_equal_a_plain_pass(name: str, tmp_path: Path) -> None:
    folder, ids = write_dense(tmp_path / "m", name), tokens(LENGTH)
    ours = runner_of(folder).model.forward([fed(ids, 0, LENGTH, [3, 1])], None)
    assert (ours - plain_logits(folder, ids)).abs().max() < 1e-9


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("llama") / "m")


def test_any_division_into_chunks_and_neighbours_gives_the_same_logits(llama: Path) -> None:
    model, ids, other = runner_of(llama).model, tokens(LENGTH), tokens(300, 1)
    whole = model.forward([fed(ids, 0, LENGTH, [1, 2])], None)
    parts = []
    for a, b in ((0, 1), (1, 128), (128, 130), (130, LENGTH)):
        rows = [fed(other, a, b, [5, 6]), fed(ids, a, b, [8, 7]), fed(other, 0, 3, [9])]
        logits = model.forward(rows, None).split([b - a, b - a, 3])
        parts.append(logits[1])
    assert (torch.cat(parts) - whole).abs().max() < 1e-10


def test_only_the_rows_asked_for_have_logits(llama: Path) -> None:
    model, ids = runner_of(llama).model, tokens(20)
    some = model.forward([fed(ids, 0, 20, [1])], torch.tensor([19, 3]))
    assert (some - model.forward([fed(ids, 0, 20, [2])], None)[[19, 3]]).abs().max() < 1e-10


def test_bytes_of_a_block_are_all_there_is_of_a_prefix(llama: Path) -> None:
    first, second, ids = runner_of(llama), runner_of(llama), tokens(140)
    assert (first.layout.state_bytes, len(first.state_bytes(0))) == (0, 0)
    first.model.forward([fed(ids, 0, 128, [4])], torch.tensor([127]))
    second.block_bytes(7)[:] = first.block_bytes(4)
    ours = second.model.forward([fed(ids, 128, 140, [7, 2])], None)
    assert (ours - plain_logits(llama, ids)[128:]).abs().max() < 1e-9


def test_every_end_token_of_the_file_ends_an_answer(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(write_dense(tmp_path / "a", seed=5)) as llm:
        (free,) = llm.generate([[5, 6, 7]], params)
    ends = [2, free.token_ids[4]]
    with LLM(write_dense(tmp_path / "b", seed=5, eos_token_id=ends)) as llm:
        (cut,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(ends[1]) + 1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "must divide hidden_size"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"eos_token_id": 320}, "eos_token_id 320 is outside"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding_window is 64"),
        ({"architectures": ["FalconForCausalLM"]}, "these do: .*LlamaForCausalLM"),
        ({"architectures": []}, "these do: "),
        ({"rope_thetaa": 5.0, "rope_theta": None}, "rope_thetaa.*rope_theta"),
    ],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused_by_name(
    llama: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    config = json.loads((llama / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        load_family_config(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_found_at_load(
    llama: Path, tmp_path: Path, value: float
) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: 1 of 6144"):
        runner_of(tmp_path)


def test_bounded_replay_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="no layer can be skipped"):
        runner_of(llama, replay="compact")


def test_the_default_device_of_the_caller_changes_nothing(llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    with LLM(llama) as llm:
        expected = llm.generate("w1 w2", params)
    torch.set_default_device("meta")
    try:
        with LLM(llama) as llm:
            assert llm.generate("w1 w2", params) == expected
    finally:
        torch.set_default_device(None)
