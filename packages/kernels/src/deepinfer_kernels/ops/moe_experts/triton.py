# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`moe_experts`: products of a row and a slot, then the sum over the slots, for few rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.moe_experts.reference import moe_experts as reference_moe_experts
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def expert_hidden_kernel(
    x, idx, w1, w3, hidden, topk, width, inner, experts, limit,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(idx + pair)
    valid = (expert >= 0) & (expert < experts)
    g = tl.zeros((ROWS,), dtype=tl.float32)
    u = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(x + pair // topk * width + cols, mask=cols < width, other=0.0).to(tl.float32)
        both = (row < tl.where(valid, inner, 0))[:, None] & (cols < width)[None, :]
        at = (expert * inner + row[:, None]) * width + cols[None, :]
        g += tl.sum(tl.load(w1 + at, mask=both, other=0.0).to(tl.float32) * v[None, :], axis=1)
        u += tl.sum(tl.load(w3 + at, mask=both, other=0.0).to(tl.float32) * v[None, :], axis=1)
    # A linear layer rounds its output, and so does the activation.
    g = g.to(hidden.dtype.element_ty).to(tl.float32)
    u = u.to(hidden.dtype.element_ty).to(tl.float32)
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(hidden + pair * inner + row, y.to(hidden.dtype.element_ty), mask=row < inner)


@triton.jit
def expert_sum_kernel(
    hidden, idx, w, w2, out, topk, width, inner, experts,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for slot in range(topk):
        pair = token * topk + slot
        expert = tl.load(idx + pair)
        valid = (expert >= 0) & (expert < experts)
        down = tl.zeros((ROWS,), dtype=tl.float32)
        for start in range(0, inner, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            v = tl.load(hidden + pair * inner + cols, mask=cols < inner, other=0.0).to(tl.float32)
            both = (row < tl.where(valid, width, 0))[:, None] & (cols < inner)[None, :]
            at = (expert * width + row[:, None]) * inner + cols[None, :]
            part = tl.load(w2 + at, mask=both, other=0.0).to(tl.float32)
            down += tl.sum(part * v[None, :], axis=1)
        down = down.to(out.dtype.element_ty).to(tl.float32)
        total += down * tl.load(w + pair).to(tl.float32)
    tl.store(out + token * width + row, total.to(out.dtype.element_ty), mask=row < width)


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    if torch_form(x, w, w1, w3, w2):
        return reference_moe_experts(x, idx, w, w1, w3, w2, limit)
    n, topk = idx.shape
    experts, inner, width = w1.shape
    x, idx = x.contiguous(), idx.contiguous()
    hidden, out = x.new_empty((n * topk, inner)), torch.empty_like(x)
    sizes = (topk, width, inner, experts)
    launch(
        expert_hidden_kernel,
        (n * topk, triton.cdiv(inner, 32)),
        x,
        idx,
        w1.contiguous(),
        w3.contiguous(),
        hidden,
        *sizes,
        limit,
        ROWS=32,
        BLOCK=64,
    )
    launch(
        expert_sum_kernel,
        (n, triton.cdiv(width, 32)),
        hidden,
        idx,
        w.contiguous(),
        w2.contiguous(),
        out,
        *sizes,
        ROWS=32,
        BLOCK=64,
    )
    return out
