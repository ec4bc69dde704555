# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`rms_norm`: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.rms_norm.reference import rms_norm as reference_rms_norm
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def rms_norm_kernel(x, weight, out, N, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    v = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    v *= 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / N + eps)
    if HAS_WEIGHT:
        v *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + cols, v.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if torch_form(x, weight):
        return reference_rms_norm(x, weight, eps)
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    kept = x if weight is None else weight.contiguous()
    launch(
        rms_norm_kernel,
        (rows,),
        x,
        kept,
        out,
        width,
        eps,
        HAS_WEIGHT=weight is not None,
        BLOCK=power_of_two(width),
    )
    return out
