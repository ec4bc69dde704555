"""The `config.json` of the demo model and the first values of its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from tokenizers import Tokenizer
from tokens import NOISE
from torch import nn
from twin import Twin, TwinConfig, compress_vocabulary, engram_primes

from deepinfer_recipe import SpecialToken


def demo_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Every key of the released file, in its nesting, at the size of a toy."""
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 96,
        "o_lora_rank": 48,
        "o_groups": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 2048,
        },
        "compress_rope_theta": 160000,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 16,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [0],
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 4000,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": max(compress_vocabulary(tokenizer)) + 1,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": tokenizer.token_to_id(NOISE),
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
        "tokenizer_compatibility": "native",
        "initializer_range": 0.02,
        "use_cache": True,
    }
    primes = engram_primes(TwinConfig.from_dict(text))
    text["engram_num_embeddings"] = [sum(primes[i]) for i in text["engram_layer_ids"]]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id(SpecialToken.Image.value),
        "text_config": text,
    }


@torch.no_grad()
def initialise(twin: Twin, seed: int) -> None:
    """Fan-in scaled matrices, outputs of sub-layers small, residual streams nearly apart."""
    draw = torch.Generator().manual_seed(seed)
    h, depth = twin.cfg.hc_mult, 2 * twin.cfg.num_hidden_layers

    def normal(p: nn.Parameter, std: float) -> None:
        p.copy_(torch.randn(p.shape, generator=draw) * std)

    for name, p in twin.named_parameters():
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            p.fill_(1.0)
        elif name.endswith("attn_sink"):
            p.zero_()
        elif name.endswith("_fn"):
            normal(p, 0.02)
        elif name.endswith("_scale"):
            p.fill_(0.2)
        elif name.endswith("_base"):
            normal(p, 0.3)
            p[:h] += math.log(1 / (h - 1))  # each stream weighs about 1/h
            p[2 * h :] += 3 * torch.eye(h).flatten()  # streams mostly keep to themselves
        elif name == "embed.weight":
            normal(p, 0.5)
        elif "embed.weight" in name:
            normal(p, 0.1)
        elif name.endswith(("head.weight", "gate.weight", "proj.weight")):
            normal(p, 0.02)
        else:
            small = depth**-0.5 if name.endswith(("wo_b.weight", "w2", "w2.weight")) else 1.0
            normal(p, small * p.shape[-1] ** -0.5)


def build(tokenizer: Tokenizer, config: dict[str, Any]) -> Twin:
    return Twin(TwinConfig.from_dict(config), compress_vocabulary(tokenizer))
