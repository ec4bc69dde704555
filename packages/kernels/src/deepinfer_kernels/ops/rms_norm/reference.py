"""Normalisation, rotary embedding and the gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    acc = acc_dtype(x.dtype)
    wide = x.to(acc)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(acc)
    return normed.to(x.dtype)
