"""Manifold-constrained hyper-connections: residual streams mixed by doubly stochastic matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def sinkhorn(mixes: Tensor, hc_eps: float, iters: int) -> Tensor:
    """Turn [n, h_in, h_out] logits into nearly doubly stochastic matrices.

    The last step divides by the column sums, so columns (over h_in) are the exact ones.
    """
    comb = torch.softmax(mixes, dim=-1) + hc_eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + hc_eps)
    return comb


def mhc_pre(
    S: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    n, h, _ = S.shape
    acc = acc_dtype(S.dtype)
    flat = S.flatten(1).to(acc)
    base, scale = base.to(acc), scale.to(acc)
    mixes = (flat @ fn.to(acc).T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    m_pre, m_post, m_comb = mixes.split([h, h, h * h], dim=-1)
    pre = torch.sigmoid(m_pre * scale[0] + base[:h]) + hc_eps
    post = 2 * torch.sigmoid(m_post * scale[1] + base[h : 2 * h])
    comb = (m_comb * scale[2] + base[2 * h :]).reshape(n, h, h)
    return pre, post, sinkhorn(comb, hc_eps, iters)
