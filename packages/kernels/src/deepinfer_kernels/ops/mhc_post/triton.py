# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`mhc_post`: one program a piece of a row, every stream read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.mhc_post.reference import mhc_post as reference_mhc_post
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def mhc_post_kernel(y, S, post, comb, out, width, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    added = tl.load(y + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(H):
        total = added * tl.load(post + row * H + k).to(tl.float32)
        for j in tl.static_range(H):
            v = tl.load(S + (row * H + j) * width + cols, mask=inside, other=0.0).to(tl.float32)
            total += v * tl.load(comb + (row * H + j) * H + k).to(tl.float32)
        at = out + (row * H + k) * width + cols
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def mhc_post(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if torch_form(y, S, post, comb):
        return reference_mhc_post(y, S, post, comb)
    n, h, width = S.shape
    y, S, post, comb = y.contiguous(), S.contiguous(), post.contiguous(), comb.contiguous()
    out = torch.empty_like(S)
    grid = (n, triton.cdiv(width, 512))
    launch(mhc_post_kernel, grid, y, S, post, comb, out, width, H=h, BLOCK=512)
    return out
