"""The wider operators, composed of the torch forms of this back end."""

from __future__ import annotations

from deepinfer_kernels.composed import Composed
from deepinfer_kernels.cpu import mhc, moe, norm
from deepinfer_kernels.formats import fake_quant
from deepinfer_kernels.reference import mhc as reference_mhc
from deepinfer_kernels.reference import moe as reference_moe
from deepinfer_kernels.reference import norm as reference_norm

PARTS = Composed(
    reference_norm.rms_norm,
    norm.rope,
    fake_quant,
    reference_norm.swiglu,
    mhc.mhc_pre,
    reference_mhc.mhc_collapse,
    reference_moe.moe_gate,
    moe.moe_experts,
)
