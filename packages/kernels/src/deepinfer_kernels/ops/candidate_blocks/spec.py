"""What `candidate_blocks` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, integer, require, shape
from deepinfer_kernels.draw import one_of, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.candidate_blocks.reference import (
    candidate_blocks as reference_candidate_blocks,
)
from deepinfer_kernels.ops.topk_select.spec import tied_logits
from deepinfer_kernels.registry import Tolerance


def candidate_blocks(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    """Which blocks of entries stay candidates: those with the best maximum over visible entries.

    x: [R, N] index logits; visible: int64 [R]. The block of the newest visible entry is always
    kept, a block without a visible entry never; ties go to the lower block.
    Returns bool [R, ceil(N / block_size)].
    """
    op = "candidate_blocks"
    floating(op, x=x)
    integer(op, visible=visible)
    shape(op, "x", x, (None, None))
    shape(op, "visible", visible, (x.shape[0],))
    require(block_size >= 1, op, f"block_size is at least 1, got {block_size}")
    require(topk_blocks >= 1, op, f"topk_blocks is at least 1, got {topk_blocks}")
    return dispatch(op, x, visible, block_size, topk_blocks)


def _blocks_args(
    g: torch.Generator, rows: int, columns: int, block: int, top: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    visible = torch.randint(0, columns + 2, (rows,), generator=g)
    return tied_logits(g, rows, columns, dtype), visible, block, top


def _blocks_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _blocks_args(g, size(g, 0, 6), size(g, 0, 90), one_of(g, (1, 8)), size(g, 1, 9), dtype)


def _blocks_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{rows}x{columns} top {top} of 8": _blocks_args(seeded(0), rows, columns, 8, top, dtype)
        for rows, columns, top in ((6, 512, 16), (48, 512, 16), (64, 65536, 2048))
    }


def _blocks_cost(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> tuple[int, int]:
    return x.numel() * x.itemsize, x.numel()


def _blocks_fake(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    blocks = (x.shape[1] + block_size - 1) // block_size
    return x.new_empty((x.shape[0], blocks), dtype=torch.bool)


SPEC = describe(
    candidate_blocks,
    reference=reference_candidate_blocks,
    fake=_blocks_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(),
    cost=_blocks_cost,
    cases=_blocks_case,
    shapes=_blocks_shapes,
    twin=False,
)
