"""Random dense checkpoints in Hugging Face form, small, and sharp enough that a slip is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deepinfer_engine.model.dense.config import DenseConfig
from deepinfer_engine.model.dense.runtime import expected_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "llama-biased": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3-rope": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3},
    "llama-linear": {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen2-yarn": {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": YARN},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "qwen3-tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 16, "sliding_window": None},
}
_TYPES = {"Llama": "llama", "Qwen2F": "qwen2", "Qwen3F": "qwen3", "Mistra": "mistral"}


def write_dense(path: Path, name: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """A model directory of `MODELS[name]`; returns it."""
    torch.manual_seed(seed)
    raw = {**SIZES, **MODELS[name], **changes}
    kind = next(v for k, v in _TYPES.items() if raw["architectures"][0].startswith(k))
    config = DenseConfig.model_validate(raw)
    tensors = {}
    for tensor, spec in expected_tensors(config).items():
        value = torch.randn(spec.shape) * (spec.shape[-1] ** -0.5 if len(spec.shape) == 2 else 0.1)
        if tensor == "embed_tokens.weight":
            value *= 4
        if tensor.endswith("norm.weight"):
            value += 1
        tensors[tensor if tensor.startswith("lm_head") else f"model.{tensor}"] = value
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**raw, "model_type": kind}))
    save_file(tensors, path / "model.safetensors")
    byte_tokenizer(raw["vocab_size"]).save(str(path / "tokenizer.json"))
    return path


def byte_tokenizer(size: int) -> Tokenizer:
    """Three special tokens, the bytes, and words up to the size."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([f"w{i}" for i in range(size - tokenizer.get_vocab_size())])
    return tokenizer
