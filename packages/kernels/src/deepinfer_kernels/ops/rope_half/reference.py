"""Rotation of channel i with channel i + half."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    acc, pairs = acc_dtype(x.dtype), cos.shape[-1]
    per_row = (x.shape[0], *(1,) * (x.dim() - 2), pairs)
    cos, sin = cos.to(acc).view(per_row), sin.to(acc).view(per_row)
    left, right = x[..., :pairs].to(acc), x[..., pairs : 2 * pairs].to(acc)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * pairs :]), dim=-1)
