"""Hyper-connections: Sinkhorn in place, mixes as batched products."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def _sinkhorn_in_place(comb: Tensor, hc_eps: float, iters: int) -> Tensor:
    """comb: [n, h_in, h_out] after softmax. Two preallocated sums serve every iteration."""
    n, h, _ = comb.shape
    comb.add_(hc_eps)
    rows, columns = comb.new_empty((n, h, 1)), comb.new_empty((n, 1, h))
    for iteration in range(iters):
        if iteration:
            torch.sum(comb, dim=2, keepdim=True, out=rows)
            comb.div_(rows.add_(hc_eps))
        torch.sum(comb, dim=1, keepdim=True, out=columns)
        comb.div_(columns.add_(hc_eps))
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
    inverse_rms = torch.linalg.vecdot(flat, flat).div_(flat.shape[1]).add_(rms_eps).rsqrt_()
    mixes = (flat @ fn.to(acc).T).mul_(inverse_rms.unsqueeze(-1))
    scale, base = scale.to(acc), base.to(acc)
    spread = scale.repeat_interleave(
        torch.tensor([h, h, h * h], device=scale.device), output_size=h * (h + 2)
    )
    mixes.mul_(spread).add_(base)
    pre = torch.sigmoid(mixes[:, :h]).add_(hc_eps)
    post = torch.sigmoid(mixes[:, h : 2 * h]).mul_(2)
    comb = torch.softmax(mixes[:, 2 * h :].reshape(n, h, h), dim=-1)
    return pre, post, _sinkhorn_in_place(comb, hc_eps, iters)
