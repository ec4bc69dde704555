"""The operators, typed and checked. Each call picks the back end the registry chose."""

from __future__ import annotations

from deepinfer_kernels.ops.attention import mla_decode_sparse, mla_sparse
from deepinfer_kernels.ops.cache import compress_pool, fake_quant, kv_load, kv_store
from deepinfer_kernels.ops.engram import engram_gate, engram_hash
from deepinfer_kernels.ops.indexer import (
    candidate_blocks,
    candidate_mask,
    index_logits,
    topk_select,
)
from deepinfer_kernels.ops.layer import (
    mhc_pre_norm,
    mla_output,
    mla_query_key,
    moe_layer,
    norm_rope_quant,
)
from deepinfer_kernels.ops.mhc import mhc_collapse, mhc_post, mhc_pre
from deepinfer_kernels.ops.moe import moe_experts, moe_gate
from deepinfer_kernels.ops.norm import rms_norm, rope, swiglu

__all__ = [
    "candidate_blocks",
    "candidate_mask",
    "compress_pool",
    "engram_gate",
    "engram_hash",
    "fake_quant",
    "index_logits",
    "kv_load",
    "kv_store",
    "mhc_collapse",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_norm",
    "mla_decode_sparse",
    "mla_output",
    "mla_query_key",
    "mla_sparse",
    "moe_experts",
    "moe_gate",
    "moe_layer",
    "norm_rope_quant",
    "rms_norm",
    "rope",
    "swiglu",
    "topk_select",
]
