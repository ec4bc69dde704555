# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`moe_gate`: one program a row; the best experts one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.moe_gate.reference import moe_gate as reference_moe_gate
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def moe_gate_kernel(
    x, weight, bias, idx, out, width, experts, bias_stride, scaling,
    TOPK: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    z = tl.zeros((EXPERTS,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
        both = (expert < experts)[:, None] & (cols < width)[None, :]
        w = tl.load(weight + expert[:, None] * width + cols[None, :], mask=both, other=0.0)
        z += tl.sum(w.to(tl.float32) * v[None, :], axis=1)
    grown = tl.exp(tl.minimum(z, 20.0))
    one = 1.0 + grown  # log(1 + e) of a small e, without losing it beside the 1
    log1p = tl.where(
        one == 1.0, grown, tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0))
    )
    scores = tl.sqrt(tl.where(z > 20.0, z, log1p))
    scores = tl.where(z != z, z, scores)
    own = tl.load(bias + row * bias_stride + expert, mask=expert < experts, other=0.0)
    ranks = scores + own.to(tl.float32)
    ranks = tl.where(ranks != ranks, float("inf"), tl.maximum(ranks, -3.0e38))
    ranks = tl.where(expert < experts, ranks, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros((SLOTS,), dtype=tl.int64)
    weights = tl.zeros((SLOTS,), dtype=tl.float32)
    for k in tl.static_range(TOPK):
        best = tl.argmax(ranks, axis=0)
        picked = tl.sum(tl.where(expert == best, scores, 0.0), axis=0)
        ranks = tl.where(expert == best, float("-inf"), ranks)
        chosen = tl.where(slot == k, best.to(tl.int64), chosen)
        weights = tl.where(slot == k, picked, weights)
    total = tl.sum(weights, axis=0)
    weights = weights / tl.where(total < 1e-20, 1e-20, total) * scaling
    tl.store(idx + row * TOPK + slot, chosen, mask=slot < TOPK)
    tl.store(out + row * TOPK + slot, weights, mask=slot < TOPK)


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    if torch_form(x, weight, bias):
        return reference_moe_gate(x, weight, bias, topk, scaling)
    n, width = x.shape
    experts = weight.shape[0]
    idx = x.new_empty((n, topk), dtype=torch.int64)
    w = x.new_empty((n, topk), dtype=torch.float32)
    launch(
        moe_gate_kernel,
        (n,),
        x.contiguous(),
        weight.contiguous(),
        bias.contiguous(),
        idx,
        w,
        width,
        experts,
        experts if bias.dim() == 2 else 0,
        scaling,
        TOPK=topk,
        SLOTS=power_of_two(topk),
        EXPERTS=power_of_two(experts),
        BLOCK=32,
    )
    return idx, w
