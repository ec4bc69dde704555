# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`grouped_mx_linear` for every target: codes are decoded with integers, products are bfloat16.

A decoded value, a code of 4 significant bits times a power of two, is a bfloat16: products are
exact, as in units that multiply the codes themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.grouped_mx_linear.reference import BLOCK
from deepinfer_kernels.triton_support.lang import decode_e2m1, decode_e4m3, decode_ue8m0
from deepinfer_kernels.triton_support.launch import launch
from deepinfer_kernels.triton_support.segments import tiles


@triton.jit
def grouped_mx_linear_kernel(
    x, x_scale, weight, weight_scale, tile_expert, tile_row, first, out, N, K,
    M: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert < 0:
        return
    row = tl.load(tile_row + tl.program_id(0)) + tl.arange(0, M)
    inside = row < tl.load(first + expert + 1)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    channel = tl.arange(0, DEPTH)
    own = (expert * N + col).to(tl.int64)
    if WEIGHTS_FIRST:  # few rows: they are the narrow side of a product
        total = tl.zeros((COLS, M), dtype=tl.float32)
    else:
        total = tl.zeros((M, COLS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        at = start + channel
        both = inside[:, None] & (at < K)[None, :]
        code = tl.load(x + row[:, None] * K + at[None, :], mask=both, other=0).to(tl.int32)
        scale = tl.load(
            x_scale + row[:, None] * (K // 32) + (at // 32)[None, :], mask=both, other=127
        ).to(tl.int32)
        a = (decode_e4m3(code) * decode_ue8m0(scale)).to(tl.bfloat16)
        both = (col < N)[:, None] & (at < K)[None, :]
        code = tl.load(
            weight + own[:, None] * (K // 2) + (at // 2)[None, :], mask=both, other=0
        ).to(tl.int32)
        code = (code >> ((at % 2) * 4)[None, :]) & 15
        scale = tl.load(
            weight_scale + own[:, None] * (K // 32) + (at // 32)[None, :], mask=both, other=127
        ).to(tl.int32)
        b = (decode_e2m1(code) * decode_ue8m0(scale)).to(tl.bfloat16)
        if WEIGHTS_FIRST:
            total += tl.dot(b, tl.trans(a))
        else:
            total += tl.dot(a, tl.trans(b))
    y = total
    if WEIGHTS_FIRST:
        y = tl.trans(total)
    kept = inside[:, None] & (col < N)[None, :]
    tl.store(out + row[:, None] * N + col[None, :], y.to(out.dtype.element_ty), mask=kept)


def grouped_mx_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: Tensor, wide: bool
) -> Tensor:
    m, k = x.shape
    experts, n = weight.shape[:2]
    out = x.new_zeros((m, n), dtype=torch.float32 if wide else torch.bfloat16)
    rows = 64 if m >= 16 * experts else 16
    expert, row = tiles(first, m, rows)
    launch(
        grouped_mx_linear_kernel,
        (expert.shape[0], triton.cdiv(n, 64)),
        x.contiguous(),
        x_scale.contiguous(),
        weight.contiguous(),
        weight_scale.contiguous(),
        expert,
        row,
        first.contiguous(),
        out,
        n,
        k,
        M=rows,
        COLS=64,
        DEPTH=2 * BLOCK if rows == 64 else BLOCK,  # more, and registers spill
        WEIGHTS_FIRST=rows < 64,
    )
    return out
