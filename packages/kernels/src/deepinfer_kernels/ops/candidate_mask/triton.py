# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`candidate_mask`, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.candidate_mask.reference import (
    candidate_mask as reference_candidate_mask,
)
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def candidate_mask_kernel(x, blocks, out, columns, count, block_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < columns
    v = tl.load(x + row * columns + cols, mask=inside)
    kept = tl.load(blocks + row * count + cols // block_size, mask=inside, other=0) != 0
    hidden = tl.full((BLOCK,), float("-inf"), dtype=v.dtype)
    tl.store(out + row * columns + cols, tl.where(kept, v, hidden), mask=inside)


def candidate_mask(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    if torch_form(x):
        return reference_candidate_mask(x, blocks, block_size)
    x, kept = x.contiguous(), blocks.contiguous().view(torch.uint8)
    rows, columns = x.shape
    out = torch.empty_like(x)
    block_size = min(block_size, max(columns, 1))
    grid = (rows, triton.cdiv(columns, 1024))
    args = (x, kept, out, columns, blocks.shape[1], block_size)
    launch(candidate_mask_kernel, grid, *args, BLOCK=1024)
    return out
