# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`rope_half`: one program a head of a row; each channel reads its partner."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.rope_half.reference import rope_half as reference_rope_half
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def rope_half_kernel(x, cos, sin, out, middle, dim, pairs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < dim
    turned = cols < 2 * pairs
    left = cols < pairs
    base = x + row * dim
    raw = tl.load(base + cols, mask=inside, other=0.0)
    other = tl.where(left, cols + pairs, cols - pairs)
    partner = tl.load(base + other, mask=turned, other=0.0).to(tl.float32)
    at = row // middle * pairs + tl.where(left, cols, cols - pairs)
    c = tl.load(cos + at, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=turned, other=0.0).to(tl.float32)
    y = raw.to(tl.float32) * c + tl.where(left, -s, s) * partner
    tl.store(out + row * dim + cols, y.to(out.dtype.element_ty), mask=turned)
    tl.store(out + row * dim + cols, raw, mask=inside & (cols >= 2 * pairs))


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if torch_form(x, cos, sin):
        return reference_rope_half(x, cos, sin)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    dim, heads = x.shape[-1], x[:1].numel() // x.shape[-1]
    launch(
        rope_half_kernel,
        (x.shape[0] * heads,),
        x,
        cos,
        sin,
        out,
        heads,
        dim,
        cos.shape[1],
        BLOCK=power_of_two(dim),
    )
    return out
