"""Mixture of experts: routing by sqrt(softplus) and the routed experts themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    acc = acc_dtype(x.dtype)
    scores = torch.nn.functional.softplus(x.to(acc) @ weight.to(acc).T).sqrt()
    ranked = (scores + bias.to(acc)).sort(dim=-1, descending=True, stable=True)
    idx = ranked.indices[:, :topk].contiguous()
    picked = scores.gather(-1, idx)
    return idx, picked / picked.sum(-1, keepdim=True).clamp(min=1e-20) * scaling
