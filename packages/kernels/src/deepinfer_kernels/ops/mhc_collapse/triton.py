# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`mhc_collapse`: one program a piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.mhc_collapse.reference import mhc_collapse as reference_mhc_collapse
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def mhc_collapse_kernel(S, pre, out, width, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for h in tl.static_range(H):
        v = tl.load(S + (row * H + h) * width + cols, mask=inside, other=0.0).to(tl.float32)
        total += v * tl.load(pre + row * H + h).to(tl.float32)
    tl.store(out + row * width + cols, total.to(out.dtype.element_ty), mask=inside)


def mhc_collapse(S: Tensor, pre: Tensor) -> Tensor:
    if torch_form(S, pre):
        return reference_mhc_collapse(S, pre)
    n, h, width = S.shape
    out = S.new_empty((n, width))
    grid = (n, triton.cdiv(width, 1024))
    launch(mhc_collapse_kernel, grid, S.contiguous(), pre.contiguous(), out, width, H=h, BLOCK=1024)
    return out
