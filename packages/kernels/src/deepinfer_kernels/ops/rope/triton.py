# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`rope`: one program a head of a row; each channel reads its partner."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.rope.reference import rope as reference_rope
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def rope_kernel(x, cos, sin, out, middle, dim, pairs, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < dim
    base = x + row * dim
    raw = tl.load(base + cols, mask=inside, other=0.0)
    place = cols - (dim - 2 * pairs)  # within the turned channels, negative before them
    turned = inside & (place >= 0)
    partner = tl.load(base + (dim - 2 * pairs) + (place ^ 1), mask=turned, other=0.0).to(tl.float32)
    at = row // middle * pairs + place // 2
    c = tl.load(cos + at, mask=turned, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=turned, other=0.0).to(tl.float32) * SIGN
    y = raw.to(tl.float32) * c + tl.where(place % 2 == 0, -s, s) * partner
    tl.store(out + row * dim + cols, y.to(out.dtype.element_ty), mask=turned)
    tl.store(out + row * dim + cols, raw, mask=inside & (place < 0))


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if torch_form(x, cos, sin):
        return reference_rope(x, cos, sin, inverse)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    dim, heads = x.shape[-1], x[:1].numel() // x.shape[-1]
    launch(
        rope_kernel,
        (x.shape[0] * heads,),
        x,
        cos,
        sin,
        out,
        heads,
        dim,
        cos.shape[1],
        SIGN=-1.0 if inverse else 1.0,
        BLOCK=power_of_two(dim),
    )
    return out
