"""The wider operators: what a layer always calls together, composed of the reference parts."""

from __future__ import annotations

from deepinfer_kernels.composed import Composed
from deepinfer_kernels.formats import fake_quant
from deepinfer_kernels.reference import mhc, moe, norm

PARTS = Composed(
    norm.rms_norm,
    norm.rope,
    fake_quant,
    norm.swiglu,
    mhc.mhc_pre,
    mhc.mhc_collapse,
    moe.moe_gate,
    moe.moe_experts,
)
