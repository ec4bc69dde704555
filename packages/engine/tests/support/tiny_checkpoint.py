"""A random checkpoint of every mechanism at tiny widths, written as a real model directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deepinfer_engine.model.v41.config import ModelConfig, load_config
from deepinfer_engine.model.v41.engram import table_primes, vocabulary_classes
from deepinfer_engine.model.v41.expected import expected_tensors

SPECIALS = ["<s>", "</s>", "<pad>", "<noise>"]


def tiny_tokenizer() -> Tokenizer:
    """Bytes plus words in case, accent and space variants, so that vocabulary compression merges
    some."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIALS + alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    words = [f"{c}{v}" for c in "bcdfghjklm" for v in ("a", "A", " a", "é", "e")]
    tokenizer.add_tokens(words)
    tokenizer.add_tokens([f"w{i}" for i in range(TINY["vocab_size"] - tokenizer.get_vocab_size())])
    return tokenizer


TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_pad_token_id": 2,
    "sliding_window": 16,
    "max_position_embeddings": 1024,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 12,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 97,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 3,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
}


TINY_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 6000,
}


def write_tiny(
    path: Path,
    seed: int = 0,
    *,
    vision: bool = False,
    tokenizer: Tokenizer | None = None,
    image_token: str = "w0",
    **changes: Any,
) -> Path:
    """Write config, tokenizer and random scaled weights; `changes` override text_config keys.

    vision: with a tower; `image_token` is then what a picture's tokens are.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    text = {**TINY, **changes}
    text["engram_compressed_vocab_size"] = max(vocabulary_classes(tokenizer)) + 1
    text["engram_num_embeddings"] = [0] * len(text["engram_layer_ids"])
    root: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "tokenizer_compatibility": "native",
        "text_config": text,
    }
    if vision:
        root["image_token_id"] = tokenizer.token_to_id(image_token)
        root["vision_config"] = TINY_VISION
    primes = table_primes(ModelConfig.model_validate(root).text_config)
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    (path / "config.json").write_text(json.dumps(root))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in expected_tensors(load_config(path)).items():
        drawn = torch.randn(spec.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.1 * drawn
        elif name.endswith(("_base", "bias", "bias_vl")):
            value = 0.5 * drawn
        elif name.endswith(("_scale", "attn_sink")):
            value = drawn
        elif "_weight" in name and "engram" in name:
            value = 1 + 0.1 * drawn
        elif name.startswith(("embed", "image_")) or "engram.embed" in name:
            value = drawn
        else:
            value = drawn / math.sqrt(spec.shape[-1])
        tensors[name] = value if spec.storage == "float32" else value.to(torch.bfloat16)
        if name.endswith("gate.bias") and not vision:
            tensors[name + "_vl"] = torch.zeros(spec.shape)
    save_file(tensors, str(path / "model.safetensors"))
    return path
