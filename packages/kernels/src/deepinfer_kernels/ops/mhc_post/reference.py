"""Manifold-constrained hyper-connections: residual streams mixed by doubly stochastic matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def mhc_post(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    acc = acc_dtype(S.dtype)
    carried = torch.einsum("njk,njc->nkc", comb.to(acc), S.to(acc))
    return (post.to(acc).unsqueeze(-1) * y.to(acc).unsqueeze(1) + carried).to(S.dtype)
