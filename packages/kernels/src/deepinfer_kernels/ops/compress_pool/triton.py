# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`compress_pool`: one program a piece of a group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.compress_pool.reference import compress_pool as reference_compress_pool
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def compress_pool_kernel(value, gate, out, dim, R: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < dim
    peak = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for i in tl.static_range(R):
        at = (group * R + i) * dim + cols
        peak = tl.maximum(peak, tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    pooled = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(R):
        at = (group * R + i) * dim + cols
        w = tl.exp(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32) - peak)
        total += w
        pooled += w * tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + group * dim + cols, pooled / total, mask=inside)


def compress_pool(value: Tensor, gate: Tensor) -> Tensor:
    if torch_form(value, gate):
        return reference_compress_pool(value, gate)
    m, r, dim = value.shape
    out = value.new_empty((m, dim), dtype=torch.float32)
    grid = (m, triton.cdiv(dim, 512))
    args = (value.contiguous(), gate.contiguous(), out, dim)
    launch(compress_pool_kernel, grid, *args, R=r, BLOCK=512)
    return out
