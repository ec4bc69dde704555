"""The parts of the wide operators in their Triton forms."""

from __future__ import annotations

from deepinfer_kernels.ops._parts import Parts
from deepinfer_kernels.ops.fake_quant.triton import fake_quant
from deepinfer_kernels.ops.mhc_collapse.triton import mhc_collapse
from deepinfer_kernels.ops.mhc_pre.triton import mhc_pre
from deepinfer_kernels.ops.moe_experts.triton import moe_experts
from deepinfer_kernels.ops.moe_gate.triton import moe_gate
from deepinfer_kernels.ops.rms_norm.triton import rms_norm
from deepinfer_kernels.ops.rope.triton import rope
from deepinfer_kernels.ops.swiglu.triton import swiglu

__all__ = ["TRITON"]

TRITON = Parts(rms_norm, rope, fake_quant, swiglu, mhc_pre, mhc_collapse, moe_gate, moe_experts)
