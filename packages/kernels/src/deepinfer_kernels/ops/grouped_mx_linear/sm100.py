# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`grouped_mx_linear` for compute capability 10.0: the codes go to the tensor unit as they are.

Rows arrive by the tensor memory accelerator, scales and weights by pointers; the unit multiplies
E4M3 with E2M1 under both scales and sums in tensor memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.grouped_mx_linear.triton import (
    grouped_mx_linear as triton_grouped_mx_linear,
)
from deepinfer_kernels.triton_support.launch import launch
from deepinfer_kernels.triton_support.segments import tiles

ROWS = 128


@triton.jit
def grouped_mx_linear_sm100_kernel(
    x, x_scale, weight, weight_scale, tile_expert, tile_row, first, out, rows, N, K,
    M: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert < 0:
        return
    top = tl.load(tile_row + tl.program_id(0)).to(tl.int32)
    row = top + tl.arange(0, M)
    inside = row < tl.load(first + expert + 1)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    own = (expert * N + col).to(tl.int64)
    blocks = tl.arange(0, DEPTH // 32)
    pairs = tl.arange(0, DEPTH // 2)
    arriving = tl.make_tensor_descriptor(x, shape=[rows, K], strides=[K, 1], block_shape=[M, DEPTH])
    total = tl.zeros((M, COLS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        a = arriving.load([top, start])  # zeros past either end
        at = start // 32 + blocks
        scale = tl.load(
            x_scale + row[:, None].to(tl.int64) * (K // 32) + at[None, :],
            mask=inside[:, None] & (at < K // 32)[None, :],
            other=127,
        )
        half = start // 2 + pairs
        b = tl.load(
            weight + own[None, :] * (K // 2) + half[:, None],
            mask=(col < N)[None, :] & (half < K // 2)[:, None],
            other=0,
        )
        weight_scales = tl.load(
            weight_scale + own[:, None] * (K // 32) + at[None, :],
            mask=(col < N)[:, None] & (at < K // 32)[None, :],
            other=127,
        )
        total = tl.dot_scaled(a, scale, "e4m3", b, weight_scales, "e2m1", total)
    kept = inside[:, None] & (col < N)[None, :]
    place = row[:, None].to(tl.int64) * N + col[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=kept)


def grouped_mx_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: Tensor, wide: bool
) -> Tensor:
    m, k = x.shape
    experts, n = weight.shape[:2]
    if m == 0 or m < 16 * experts:  # mostly empty tiles
        return triton_grouped_mx_linear(x, x_scale, weight, weight_scale, first, wide)
    out = x.new_zeros((m, n), dtype=torch.float32 if wide else torch.bfloat16)
    expert, row = tiles(first, m, ROWS)
    launch(
        grouped_mx_linear_sm100_kernel,
        (expert.shape[0], triton.cdiv(n, 128)),
        x.contiguous(),
        x_scale.contiguous(),
        weight.contiguous(),
        weight_scale.contiguous(),
        expert,
        row,
        first.contiguous(),
        out,
        m,
        n,
        k,
        M=ROWS,
        COLS=128,
        DEPTH=128,
        descriptors=True,
    )
    return out
