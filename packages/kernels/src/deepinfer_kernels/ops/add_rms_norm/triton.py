# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`add_rms_norm`: the sum is rounded, kept and normed in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.add_rms_norm.reference import add_rms_norm as reference_add_rms_norm
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, total, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    v = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
    rounded = v.to(total.dtype.element_ty)
    tl.store(total + row + cols, rounded, mask=inside)
    v = rounded.to(tl.float32)
    v *= 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / N + eps)
    v *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + cols, v.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if torch_form(x, residual, weight):
        return reference_add_rms_norm(x, residual, weight, eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    launch(
        add_rms_norm_kernel,
        (x.numel() // width if width else 0,),
        x,
        residual,
        weight,
        out,
        total,
        width,
        eps,
        BLOCK=power_of_two(width),
    )
    return out, total
