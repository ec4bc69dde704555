"""The operators, typed and checked. Each call picks the back end the registry chose.

One folder an operator. ``spec.py`` holds its function and everything else that is said about it;
back end B of operator O is the function O of the module ``ops/O/B.py``.
"""

from __future__ import annotations

from importlib import import_module

from deepinfer_kernels.ops.add_rms_norm.spec import add_rms_norm
from deepinfer_kernels.ops.candidate_blocks.spec import candidate_blocks
from deepinfer_kernels.ops.candidate_mask.spec import candidate_mask
from deepinfer_kernels.ops.compress_pool.spec import compress_pool
from deepinfer_kernels.ops.engram_gate.spec import engram_gate
from deepinfer_kernels.ops.engram_hash.spec import engram_hash
from deepinfer_kernels.ops.fake_quant.spec import fake_quant
from deepinfer_kernels.ops.gqa_attention.spec import gqa_attention
from deepinfer_kernels.ops.grouped_mx_linear.spec import grouped_mx_linear
from deepinfer_kernels.ops.index_logits.spec import index_logits
from deepinfer_kernels.ops.index_topk.spec import index_topk
from deepinfer_kernels.ops.kv_load.spec import kv_load
from deepinfer_kernels.ops.kv_store.spec import kv_store
from deepinfer_kernels.ops.mhc_collapse.spec import mhc_collapse
from deepinfer_kernels.ops.mhc_post.spec import mhc_post
from deepinfer_kernels.ops.mhc_post_pre_norm.spec import mhc_post_pre_norm
from deepinfer_kernels.ops.mhc_pre.spec import mhc_pre
from deepinfer_kernels.ops.mhc_pre_norm.spec import mhc_pre_norm
from deepinfer_kernels.ops.mla_decode_sparse.spec import mla_decode_sparse
from deepinfer_kernels.ops.mla_output.spec import mla_output
from deepinfer_kernels.ops.mla_query_key.spec import mla_query_key
from deepinfer_kernels.ops.mla_sparse.spec import mla_sparse
from deepinfer_kernels.ops.moe_experts.spec import moe_experts
from deepinfer_kernels.ops.moe_gate.spec import moe_gate
from deepinfer_kernels.ops.moe_layer.spec import moe_layer
from deepinfer_kernels.ops.norm_rope_quant.spec import norm_rope_quant
from deepinfer_kernels.ops.qkv_rope_store.spec import qkv_rope_store
from deepinfer_kernels.ops.quant_linear.spec import quant_linear
from deepinfer_kernels.ops.rms_norm.spec import rms_norm
from deepinfer_kernels.ops.rope.spec import rope
from deepinfer_kernels.ops.rope_half.spec import rope_half
from deepinfer_kernels.ops.silu_mul.spec import silu_mul
from deepinfer_kernels.ops.swiglu.spec import swiglu
from deepinfer_kernels.ops.topk_select.spec import topk_select

__all__ = [
    "add_rms_norm",
    "candidate_blocks",
    "candidate_mask",
    "compress_pool",
    "engram_gate",
    "engram_hash",
    "fake_quant",
    "gqa_attention",
    "grouped_mx_linear",
    "index_logits",
    "index_topk",
    "kv_load",
    "kv_store",
    "mhc_collapse",
    "mhc_post",
    "mhc_post_pre_norm",
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
    "qkv_rope_store",
    "quant_linear",
    "rms_norm",
    "rope",
    "rope_half",
    "silu_mul",
    "swiglu",
    "topk_select",
]

import_module("deepinfer_kernels.library")  # the same operators as torch.ops.deepinfer.<name>
