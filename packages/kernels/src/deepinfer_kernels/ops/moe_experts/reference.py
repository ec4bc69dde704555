"""Mixture of experts: routing by sqrt(softplus) and the routed experts themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.ops.swiglu.reference import swiglu as reference_swiglu

CHUNK_BYTES = 32 << 20


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    n, hidden = x.shape
    acc = acc_dtype(x.dtype)
    out = torch.zeros((n, hidden), dtype=acc, device=x.device)
    step = max(1, CHUNK_BYTES // max(1, 3 * w1[0].numel() * w1.dtype.itemsize))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        column = x[rows].unsqueeze(-1)
        for slot in range(idx.shape[1]):  # fixed order: the sum is the same for every batch
            expert = idx[rows, slot]
            # index_select, for a negative expert must raise and not count from the end
            gate = w1.index_select(0, expert) @ column
            up = w3.index_select(0, expert) @ column
            down = (w2.index_select(0, expert) @ reference_swiglu(gate, up, limit)).squeeze(-1)
            out[rows] += w[rows, slot, None].to(acc) * down.to(acc)
    return out.to(x.dtype)
