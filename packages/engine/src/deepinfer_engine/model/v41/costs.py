"""What a configuration costs: parameters, cache bytes and floating point work, from `config.json`
alone.

Work is counted in FP8-equivalent FLOPs: a multiply-add is two operations at FP8, one at FP4, four
at BF16, eight at FP32. Context length `T` includes the current token. Figures of prefill are those
of the token at position T of a long prompt, its one row of logits left out; `compact` is a row
that bounded replay drops at the first consumer layer.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from deepinfer_engine.adapters.kernels import formats
from deepinfer_engine.core.runner import BLOCK_TOKENS
from deepinfer_engine.model.checkpoint import TensorSpec
from deepinfer_engine.model.v41.config import ModelConfig, TextConfig
from deepinfer_engine.model.v41.expected import expected_tensors
from deepinfer_engine.model.v41.layout import build_layout

_FP4, _FP8, _BF16, _FP32 = 1, 2, 4, 8
_EXPERT = re.compile(r"\.experts\.")
_VISION = re.compile(r"vision\.|aligner\.|image_")
_ROUTING_BIAS = re.compile(r"\.gate\.bias(_vl)?$")
_STORED_BYTES = {"float": 2, "float32": 4, "fp8": 1, "fp8_rows": 1, "fp4": 0.5}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts of weights; `active_*` are those that one token's matrices touch."""

    expert: int
    """One routed expert."""
    attention: int
    """One layer's projections, without compressor and indexer."""
    backbone: int
    """Embedding, head and all layers; n-gram tables left out."""
    engram_tables: int
    draft: int
    active_decode: int
    active_prefill_compact: int
    vision: int
    """Tower, projector, and the learned marks of a picture's span; 0 for a text model."""
    stored_bytes: int
    """Size of the checkpoint's tensors, scales included."""


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes of the reference record formats."""

    block: int
    """128 tokens of persistent cache."""
    per_token: float
    state: int
    """One running sequence: windows of all layers, draft layers and open groups."""


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Per token at context length `tokens`."""

    tokens: int
    decode_flops: int
    prefill_flops: int
    prefill_compact_flops: int
    decode_read_bytes: int
    resident_bytes: int


def count_parameters(config: ModelConfig) -> Parameters:
    """Counted over the very tensors the loader asks for."""
    c = config.text_config
    specs = expected_tensors(config)
    sizes = {name: math.prod(spec.shape) for name, spec in specs.items()}
    tables = sum(n for name, n in sizes.items() if name.endswith("engram.embed.weight"))
    draft = sum(n for name, n in sizes.items() if name.startswith("mtp."))
    vision = sum(n for name, n in sizes.items() if _VISION.match(name))

    def of(name: str) -> int:
        return sizes[f"layers.0.attn.{name}.weight"]

    expert = 3 * c.hidden_size * c.moe_intermediate_size
    layers = _active_by_layer(c, sizes)
    first = c.n_producers
    # Of the first consumer layer every row still feeds the compressor and the mix before it.
    parts = ("attn.compressor", "attn.indexer.wk", "hc_attn")
    shared = tuple(f"layers.{first}.{part}" for part in parts)
    boundary = sum(n for name, n in sizes.items() if name.startswith(shared))
    return Parameters(
        expert=expert,
        attention=sum(of(n) for n in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
        backbone=sum(sizes.values()) - tables - draft - vision,
        engram_tables=tables,
        draft=draft,
        vision=vision,
        active_decode=sum(layers) + sizes["head.weight"],
        active_prefill_compact=sum(layers[:first]) + boundary,
        stored_bytes=sum(_stored_bytes(name, spec) for name, spec in specs.items()),
    )


def _active_by_layer(c: TextConfig, sizes: dict[str, int]) -> list[int]:
    active = [
        c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
        for _ in range(c.num_hidden_layers)
    ]
    for name, count in sizes.items():
        if name.startswith("layers.") and not (
            _EXPERT.search(name) or name.endswith("engram.embed.weight")
        ):
            active[int(name.split(".", 2)[1])] += count
    return active


def _stored_bytes(name: str, spec: TensorSpec) -> int:
    scale = spec.scale_shape
    # The loader takes routing biases in any float; the released file has them in float32.
    wide = _ROUTING_BIAS.search(name) is not None
    values = math.prod(spec.shape) * _STORED_BYTES["float32" if wide else spec.storage]
    return int(values) + (0 if scale is None else math.prod(scale))


def cache_cost(config: ModelConfig) -> CacheCost:
    """From the layout that the runtime itself uses."""
    layout = build_layout(
        config.text_config, dtype=torch.bfloat16, cache_quant="reference", fingerprint=""
    )
    return CacheCost(layout.block_bytes, layout.block_bytes / BLOCK_TOKENS, layout.state_bytes)


def context_cost(config: ModelConfig, tokens: int) -> ContextCost:
    """Work and traffic of one token whose context, itself included, has `tokens` tokens."""
    c = config.text_config
    layers = [_layer_flops(c, layer, tokens) for layer in range(c.num_hidden_layers)]
    whole = sum(layers)
    compact = whole
    if c.n_producers < c.num_hidden_layers:
        first = c.n_producers
        mix = c.hc_mult * c.hidden_size * (c.hc_mult * (c.hc_mult + 2) + 1)
        compact = sum(layers[:first]) + _compressor_flops(c, first) + _FP32 * mix
    blocks = -(-tokens // BLOCK_TOKENS) * cache_cost(config).block
    return ContextCost(
        tokens=tokens,
        decode_flops=whole + _BF16 * c.hidden_size * c.vocab_size,
        prefill_flops=whole,
        prefill_compact_flops=compact,
        decode_read_bytes=_read_bytes(c, tokens),
        resident_bytes=blocks,
    )


def _layer_flops(c: TextConfig, layer: int, tokens: int) -> int:
    H, D, h, heads = c.hidden_size, c.head_dim, c.hc_mult, c.num_attention_heads
    ratio = c.compress_ratios[layer]
    entries = tokens // ratio if ratio else 0
    keys = min(tokens, c.sliding_window) + min(entries, c.index_topk)
    flops = _FP8 * (
        H * c.q_lora_rank
        + c.q_lora_rank * heads * D
        + H * D
        + heads * D * c.o_lora_rank
        + c.o_groups * c.o_lora_rank * H
    )
    flops += _BF16 * heads * 2 * D * keys
    if layer in c.index_source_layer_ids:
        Hi, Di = c.index_n_heads, c.index_head_dim
        flops += _FP8 * c.q_lora_rank * Hi * Di + _BF16 * H * Hi
        flops += _FP4 * Hi * Di * _scored(c, layer, entries)
    flops += _compressor_flops(c, layer)
    experts = c.num_experts_per_tok + c.n_shared_experts
    flops += _FP8 * 3 * H * c.moe_intermediate_size * experts + _BF16 * H * c.n_routed_experts
    flops += 2 * _FP32 * (h * H * h * (h + 2) + h * H + h * (h + 1) * H)
    if layer in c.engram_layer_ids:
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
        flops += _FP8 * columns * H * (h + 1) + _FP32 * h * H
    return flops


def _scored(c: TextConfig, layer: int, entries: int) -> int:
    """Index keys that a top-k source compares with one query."""
    source = c.candidate_source_layer_id
    if source is None or layer <= source:
        return entries
    size = c.candidate_block_size
    return min(-(-entries // size), c.candidate_topk_blocks) * size


def _compressor_flops(c: TextConfig, layer: int) -> int:
    if layer not in c.kv_source_layer_ids:
        return 0
    ratio = c.compress_ratios[layer]
    projections = 1 if ratio == 1 else 2
    return (
        _BF16 * c.hidden_size * c.head_dim * projections
        + _BF16 * c.head_dim * c.index_head_dim // ratio
    )


def _read_bytes(c: TextConfig, tokens: int) -> int:
    main = "fp4" if c.use_fp4_sparse_kv else "fp8"
    window = formats.record_bytes("fp8", c.head_dim, torch.bfloat16)
    entry = formats.record_bytes(main, c.head_dim, torch.bfloat16)
    key = formats.record_bytes("index_fp4", c.index_head_dim, torch.bfloat16)
    total = c.num_hidden_layers * min(tokens, c.sliding_window) * window
    for layer in range(c.num_hidden_layers):
        ratio = c.compress_ratios[layer]
        if ratio:
            total += min(tokens // ratio, c.index_topk) * entry
            if layer in c.index_source_layer_ids:
                total += _scored(c, layer, tokens // ratio) * key
    return total
