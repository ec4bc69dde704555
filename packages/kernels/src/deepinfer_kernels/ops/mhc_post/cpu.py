"""Hyper-connections: Sinkhorn in place, mixes as batched products."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def mhc_post(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    acc = acc_dtype(S.dtype)
    added = post.to(acc).unsqueeze(-1) * y.to(acc).unsqueeze(1)
    return torch.baddbmm(added, comb.to(acc).transpose(1, 2), S.to(acc)).to(S.dtype)
