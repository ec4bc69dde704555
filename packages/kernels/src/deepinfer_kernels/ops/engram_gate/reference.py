"""Engram: hashed n-gram tables and the gate that adds their rows to the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def engram_gate(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> Tensor:
    acc = acc_dtype(S.dtype)
    streams, keys = S.to(acc), key.to(acc)
    norm_s = torch.rsqrt(streams.square().mean(-1) + eps)
    norm_k = torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (streams * q_weight.to(acc) * k_weight.to(acc) * keys).sum(-1)
    g = norm_s * norm_k * dot * S.shape[-1] ** -0.5
    gate = torch.sigmoid(g.sign() * g.abs().clamp(min=1e-6).sqrt())
    if blocked is not None:
        gate = gate.masked_fill(blocked.unsqueeze(-1), 0)
    return (streams + gate.unsqueeze(-1) * value.to(acc).unsqueeze(1)).to(S.dtype)
