"""The parts of the wide operators in their CPU forms."""

from __future__ import annotations

from dataclasses import replace

from deepinfer_kernels.ops._parts import REFERENCE, Parts
from deepinfer_kernels.ops.fake_quant.native import fake_quant
from deepinfer_kernels.ops.mhc_collapse.native import mhc_collapse
from deepinfer_kernels.ops.mhc_pre.cpu import mhc_pre as wide_mhc_pre
from deepinfer_kernels.ops.mhc_pre.native import mhc_pre
from deepinfer_kernels.ops.moe_experts.cpu import moe_experts as wide_moe_experts
from deepinfer_kernels.ops.moe_experts.native import moe_experts
from deepinfer_kernels.ops.moe_gate.native import moe_gate
from deepinfer_kernels.ops.rms_norm.native import rms_norm
from deepinfer_kernels.ops.rope.cpu import rope as wide_rope
from deepinfer_kernels.ops.rope.native import rope
from deepinfer_kernels.ops.swiglu.native import swiglu

__all__ = ["NATIVE", "WIDE"]

WIDE = replace(REFERENCE, rope=wide_rope, pre=wide_mhc_pre, experts=wide_moe_experts)
NATIVE = Parts(rms_norm, rope, fake_quant, swiglu, mhc_pre, mhc_collapse, moe_gate, moe_experts)
