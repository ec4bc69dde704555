"""What `candidate_mask` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import one_of, seeded, size
from deepinfer_kernels.ops._describe import describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.candidate_mask.reference import (
    candidate_mask as reference_candidate_mask,
)
from deepinfer_kernels.ops.topk_select.spec import tied_logits
from deepinfer_kernels.registry import Tolerance


def candidate_mask(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """x with -inf outside the kept blocks.

    x: [R, N]; blocks: bool [R, ceil(N / block_size)]. Returns [R, N] like x.
    """
    op = "candidate_mask"
    floating(op, x=x)
    shape(op, "x", x, (None, None))
    require(block_size >= 1, op, f"block_size is at least 1, got {block_size}")
    require(blocks.dtype is torch.bool, op, f"blocks is bool, got {blocks.dtype}")
    shape(op, "blocks", blocks, (x.shape[0], -(-x.shape[1] // block_size)))
    return dispatch(op, x, blocks, block_size)


def _mask_args(
    g: torch.Generator, rows: int, columns: int, block: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    kept = torch.rand(rows, -(-columns // block), generator=g) < 0.5
    return tied_logits(g, rows, columns, dtype), kept, block


def _mask_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _mask_args(g, size(g, 0, 6), size(g, 0, 90), one_of(g, (1, 8, 16)), dtype)


def _mask_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{rows}x{columns}": _mask_args(seeded(0), rows, columns, 8, dtype)
        for rows, columns in ((6, 512), (48, 512), (64, 65536))
    }


def _mask_cost(x: Tensor, blocks: Tensor, block_size: int) -> tuple[int, int]:
    return 2 * x.numel() * x.itemsize, x.numel()


SPEC = describe(
    candidate_mask,
    reference=reference_candidate_mask,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(),
    cost=_mask_cost,
    cases=_mask_case,
    shapes=_mask_shapes,
)
