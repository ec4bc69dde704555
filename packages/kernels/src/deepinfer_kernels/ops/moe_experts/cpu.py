"""Routed experts: gathered weights for few rows, rows sorted by expert for many."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.ops.swiglu.reference import swiglu as reference_swiglu

GATHER_UP_TO_BYTES = 4 << 20
"""Gathered expert weights up to this size stay in cache; beyond it sorting wins."""


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    n, topk = idx.shape
    acc = acc_dtype(x.dtype)
    if n == 0 or topk == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    expert = idx.reshape(-1)
    gathered_bytes = expert.shape[0] * 3 * w1[0].numel() * w1.itemsize
    if gathered_bytes <= GATHER_UP_TO_BYTES or expert.shape[0] <= 2:
        down = _gathered(x, expert, topk, w1, w3, w2, limit)
    else:
        down = _sorted(x, expert, topk, w1, w3, w2, limit)
    return torch.bmm(w.to(acc).unsqueeze(1), down.to(acc).view(n, topk, -1)).squeeze(1).to(x.dtype)


def _gathered(
    x: Tensor, expert: Tensor, topk: int, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """[n * topk, H]: every (row, slot) multiplies its own copy of the weights."""
    column = x.repeat_interleave(topk, dim=0).unsqueeze(-1)
    gate = torch.bmm(w1.index_select(0, expert), column)
    up = torch.bmm(w3.index_select(0, expert), column)
    return torch.bmm(w2.index_select(0, expert), reference_swiglu(gate, up, limit)).squeeze(-1)


def _sorted(
    x: Tensor, expert: Tensor, topk: int, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """[n * topk, H]: the rows of each touched expert, padded to the fullest, in one product."""
    order = expert.sort(stable=True).indices
    touched, counts = torch.unique_consecutive(expert[order], return_counts=True)
    capacity = int(counts.max())
    starts = counts.cumsum(0) - counts
    place = torch.arange(expert.shape[0], device=x.device) - starts.repeat_interleave(counts)
    group = torch.arange(touched.shape[0], device=x.device).repeat_interleave(counts)
    padded = x.new_zeros((touched.shape[0], capacity, x.shape[1]))
    padded[group, place] = x[order // topk]
    gate = torch.bmm(padded, w1.index_select(0, touched).transpose(1, 2))
    up = torch.bmm(padded, w3.index_select(0, touched).transpose(1, 2))
    down = torch.bmm(reference_swiglu(gate, up, limit), w2.index_select(0, touched).transpose(1, 2))
    unsorted = x.new_empty((expert.shape[0], x.shape[1]))
    unsorted[order] = down[group, place]
    return unsorted
