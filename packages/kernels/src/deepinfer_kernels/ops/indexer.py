"""Choosing which compressed entries a query attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, integer, require, shape
from deepinfer_kernels.ops._dispatch import kernel


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    """``sum_head w_head * relu(q_head . k_e)``, -inf from entry ``visible`` on.

    q: [S, Q, hi, di]; k: [S, E, di]; w: [S, Q, hi]; visible: int64 [S, Q] entries the query sees.
    Returns [S, Q, E] in the accumulation dtype.
    """
    op = "index_logits"
    floating(op, q=q, k=k, w=w)
    integer(op, visible=visible)
    shape(op, "q", q, (None, None, None, None))
    shape(op, "k", k, (q.shape[0], None, q.shape[3]))
    shape(op, "w", w, q.shape[:3])
    shape(op, "visible", visible, q.shape[:2])
    return kernel(op, q.device)(q, k, w, visible)


def topk_select(x: Tensor, k: int) -> Tensor:
    """The k largest of each row, exactly; on ties the lower index wins.

    x: [R, N]. -inf and NaN are never selected. Returns int64 [R, k]: ascending indices, then -1.
    """
    floating("topk_select", x=x)
    shape("topk_select", "x", x, (None, None))
    require(k >= 0, "topk_select", f"k is at least 0, got {k}")
    return kernel("topk_select", x.device)(x, k)


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
    return kernel(op, x.device)(x, visible, block_size, topk_blocks)


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
    return kernel(op, x.device)(x, blocks, block_size)
