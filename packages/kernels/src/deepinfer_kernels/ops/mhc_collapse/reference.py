"""Manifold-constrained hyper-connections: residual streams mixed by doubly stochastic matrices."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def mhc_collapse(S: Tensor, pre: Tensor) -> Tensor:
    acc = acc_dtype(S.dtype)
    return (S.to(acc) * pre.to(acc).unsqueeze(-1)).sum(dim=1).to(S.dtype)
