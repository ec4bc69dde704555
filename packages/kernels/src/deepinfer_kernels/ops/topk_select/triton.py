# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`topk_select`: the k-th largest key by four passes of counting, then one in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.topk_select.reference import topk_select as reference_topk_select
from deepinfer_kernels.triton_support.lang import ordered
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form
from deepinfer_kernels.triton_support.select import radix_threshold


@triton.jit
def topk_select_kernel(x, out, N, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = x + row * N
    threshold, ties = radix_threshold(base, N, k, BLOCK)
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + row * k + at, tl.full((BLOCK,), -1, dtype=tl.int64), mask=at < k)
    tl.debug_barrier()
    taken = tl.zeros((), dtype=tl.int32)
    tied = tl.zeros((), dtype=tl.int32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < N
        v = tl.load(base + cols, mask=inside, other=float("-inf")).to(tl.float32)
        key = ordered(v)
        equal = ((key == threshold) & (key > 0)).to(tl.int32)
        before = tied + tl.cumsum(equal, axis=0) - equal  # ties before this one
        chosen = ((key > threshold) & (key > 0)) | ((equal > 0) & (before < ties))
        one = chosen.to(tl.int32)
        place = taken + tl.cumsum(one, axis=0) - one
        tl.store(out + row * k + place, cols.to(tl.int64), mask=chosen)
        taken += tl.sum(one, axis=0)
        tied += tl.sum(equal, axis=0)


def topk_select(x: Tensor, k: int) -> Tensor:
    if torch_form(x):
        return reference_topk_select(x, k)
    rows, columns = x.shape
    out = x.new_full((rows, k), -1, dtype=torch.int64)
    if columns and k:
        block = min(power_of_two(columns, 16), 1024)
        launch(topk_select_kernel, (rows,), x.contiguous(), out, columns, k, BLOCK=block)
    return out
