"""Mixture of experts: routing by sqrt(softplus) and the routed experts themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.reference.norm import swiglu

CHUNK_BYTES = 32 << 20


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    acc = acc_dtype(x.dtype)
    scores = torch.nn.functional.softplus(x.to(acc) @ weight.to(acc).T).sqrt()
    ranked = (scores + bias.to(acc)).sort(dim=-1, descending=True, stable=True)
    idx = ranked.indices[:, :topk].contiguous()
    picked = scores.gather(-1, idx)
    return idx, picked / picked.sum(-1, keepdim=True).clamp(min=1e-20) * scaling


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
            down = (w2.index_select(0, expert) @ swiglu(gate, up, limit)).squeeze(-1)
            out[rows] += w[rows, slot, None].to(acc) * down.to(acc)
    return out.to(x.dtype)
