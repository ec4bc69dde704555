# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`candidate_blocks`: block maxima, then the best of them by counting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.candidate_blocks.reference import (
    candidate_blocks as reference_candidate_blocks,
)
from deepinfer_kernels.triton_support.lang import ordered
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form
from deepinfer_kernels.triton_support.select import radix_threshold


@triton.jit
def block_max_kernel(
    x, visible, best, columns, blocks, block_size, lowest, highest, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    seen = tl.minimum(tl.maximum(tl.load(visible + row), 0), columns)
    start = block.to(tl.int64) * block_size
    peak = tl.full((), lowest, dtype=tl.float32)
    for offset in range(0, block_size, BLOCK):
        cols = offset + tl.arange(0, BLOCK)
        inside = (cols < block_size) & (start + cols < seen)
        v = tl.load(x + row * columns + start + cols, mask=inside, other=lowest).to(tl.float32)
        v = tl.where(v != v, lowest, v)  # NaN counts for nothing
        peak = tl.maximum(peak, tl.max(v, axis=0))
    peak = tl.minimum(peak, highest)
    newest = (seen > start) & (seen <= start + block_size)
    peak = tl.where(newest, float("inf"), peak)
    peak = tl.where(start < seen, peak, float("-inf"))
    tl.store(best + row * blocks + block, peak)


@triton.jit
def keep_best_kernel(best, out, N, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = best + row * N
    threshold, ties = radix_threshold(base, N, k, BLOCK)
    tied = tl.zeros((), dtype=tl.int32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(base + cols, mask=cols < N, other=float("-inf"))
        key = ordered(v)
        equal = ((key == threshold) & (key > 0)).to(tl.int32)
        before = tied + tl.cumsum(equal, axis=0) - equal
        chosen = ((key > threshold) & (key > 0)) | ((equal > 0) & (before < ties))
        tl.store(out + row * N + cols, chosen.to(tl.uint8), mask=cols < N)
        tied += tl.sum(equal, axis=0)


def candidate_blocks(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    if torch_form(x):
        return reference_candidate_blocks(x, visible, block_size, topk_blocks)
    rows, columns = x.shape
    block_size = min(block_size, max(columns, 1))
    blocks = triton.cdiv(columns, block_size)
    best = x.new_empty((rows, blocks), dtype=torch.float32)
    out = x.new_zeros((rows, blocks), dtype=torch.uint8)
    limits = torch.finfo(x.dtype)
    launch(
        block_max_kernel,
        (rows, blocks),
        x.contiguous(),
        visible.contiguous(),
        best,
        columns,
        blocks,
        block_size,
        limits.min,
        limits.max,
        BLOCK=min(power_of_two(block_size), 1024),
    )
    if blocks:
        block = min(power_of_two(blocks, 16), 1024)
        launch(keep_best_kernel, (rows,), best, out, blocks, min(topk_blocks, blocks), BLOCK=block)
    return out.view(torch.bool)
