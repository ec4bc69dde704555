# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`swiglu`, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.swiglu.reference import swiglu as reference_swiglu
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def swiglu_kernel(gate, up, out, count, limit, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(g > limit, limit, g)  # and not a minimum: NaN stays NaN
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if torch_form(gate, up):
        return reference_swiglu(gate, up, limit)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count = gate.numel()
    launch(swiglu_kernel, (triton.cdiv(count, 1024),), gate, up, out, count, limit, BLOCK=1024)
    return out
