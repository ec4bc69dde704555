# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`norm_rope_quant`: one program a row, read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.norm_rope_quant.reference import (
    norm_rope_quant as reference_norm_rope_quant,
)
from deepinfer_kernels.triton_support.lang import decoded, quantised, scale_value
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form
from deepinfer_kernels.triton_support.records import RECORD


@triton.jit
def norm_rope_quant_kernel(
    x, weight, cos, sin, out, dim, pairs, eps,
    RECORD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < dim
    v = tl.load(x + row * dim + cols, mask=inside, other=0.0).to(tl.float32)
    v *= 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / dim + eps)
    v *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    v = v.to(out.dtype.element_ty).to(tl.float32)  # as a norm of its own rounds
    even, odd = tl.split(tl.reshape(v, (BLOCK // 2, 2)))
    place = tl.arange(0, BLOCK // 2) - (dim - 2 * pairs) // 2
    turned = (place >= 0) & (place < pairs)
    c = tl.load(cos + row * pairs + place, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + row * pairs + place, mask=turned, other=0.0).to(tl.float32)
    v = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (BLOCK,))
    if RECORD < 3:
        v = v.to(out.dtype.element_ty).to(tl.float32)
        codes, scale = quantised(tl.reshape(v, (BLOCK // SIZE, SIZE)), RECORD)
        v = tl.reshape(decoded(codes, RECORD) * scale_value(scale, RECORD)[:, None], (BLOCK,))
    tl.store(out + row * dim + cols, v.to(out.dtype.element_ty), mask=inside)


def norm_rope_quant(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: str
) -> Tensor:
    if torch_form(x, weight, cos, sin) or x.shape[1] % 2:
        return reference_norm_rope_quant(x, weight, eps, cos, sin, record)
    x = x.contiguous()
    out = torch.empty_like(x)
    n, dim = x.shape
    launch(
        norm_rope_quant_kernel,
        (n,),
        x,
        weight.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        out,
        dim,
        cos.shape[1],
        eps,
        RECORD=RECORD[record],
        SIZE=16 if record == "fp4" else 32,
        BLOCK=power_of_two(dim, 32),
    )
    return out
