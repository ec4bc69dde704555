"""The narrow operators that the wide ones are composed of.

A wide operator stands for a piece of a transformer layer whose parts are always called together.
Its composition is written once, in its ``reference.py``: given the reference parts it is the
oracle, given the fastest ones it is what runs where there are too many rows for a fused form, and
the products go to torch's linear (oneDNN, which knows the matrix units of the machine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deepinfer_kernels.formats.quant import fake_quant
from deepinfer_kernels.ops.mhc_collapse.reference import mhc_collapse
from deepinfer_kernels.ops.mhc_pre.reference import mhc_pre
from deepinfer_kernels.ops.moe_experts.reference import moe_experts
from deepinfer_kernels.ops.moe_gate.reference import moe_gate
from deepinfer_kernels.ops.rms_norm.reference import rms_norm
from deepinfer_kernels.ops.rope.reference import rope
from deepinfer_kernels.ops.swiglu.reference import swiglu

__all__ = ["REFERENCE", "Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """One form of each, with the arguments it has in `deepinfer_kernels.ops`."""

    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    fake_quant: Callable[[Tensor, str], Tensor]
    swiglu: Callable[[Tensor, Tensor, float], Tensor]
    pre: Callable[..., tuple[Tensor, Tensor, Tensor]]
    collapse: Callable[[Tensor, Tensor], Tensor]
    gate: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]


REFERENCE = Parts(rms_norm, rope, fake_quant, swiglu, mhc_pre, mhc_collapse, moe_gate, moe_experts)
