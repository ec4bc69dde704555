"""Normalisation, rotary embedding and the gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    rotary = 2 * cos.shape[-1]
    acc = acc_dtype(x.dtype)
    per_row = (x.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.to(acc).view(per_row), sin.to(acc).view(per_row)
    if inverse:
        sin = -sin
    kept, turned = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    even, odd = turned[..., 0::2].to(acc), turned[..., 1::2].to(acc)
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((kept, pairs.flatten(-2).to(x.dtype)), dim=-1)
