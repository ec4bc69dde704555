"""Torch forms arranged for few, wide calls on a CPU. Inference only: they reuse their buffers.

Only operators that measurably gain are here; the others keep their reference form.
"""

from __future__ import annotations

from deepinfer_kernels.capability import Requirement
from deepinfer_kernels.cpu import attention, indexer, layer, mhc, moe, norm
from deepinfer_kernels.registry import Impl, Registry

__all__ = ["register"]

_ON_CPU = Requirement(frozenset({"cpu"}))
_FORMS = {
    "rope": norm.rope,
    "mhc_pre": mhc.mhc_pre,
    "mhc_post": mhc.mhc_post,
    "mla_sparse": attention.mla_sparse,
    "index_logits": indexer.index_logits,
    "topk_select": indexer.topk_select,
    "moe_experts": moe.moe_experts,
    "mhc_pre_norm": layer.PARTS.mhc_pre_norm,
    "norm_rope_quant": layer.PARTS.norm_rope_quant,
    "mla_query_key": layer.PARTS.mla_query_key,
    "mla_output": layer.PARTS.mla_output,
    "moe_layer": layer.PARTS.moe_layer,
}


def register(registry: Registry) -> None:
    """Add every form of this back end."""
    for op, fn in _FORMS.items():
        registry.add_impl(Impl(op, "cpu", fn, _ON_CPU, evidence="benches/results/cpu.json"))
