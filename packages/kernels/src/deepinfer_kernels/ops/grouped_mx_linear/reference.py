"""Products of block-scaled rows with the block-scaled matrix of their expert."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from deepinfer_kernels.formats.codes import e2m1_byte_values, e4m3_values, ue8m0_values

BLOCK = 32
"""Channels that share a scale."""


def grouped_mx_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: Tensor, wide: bool
) -> Tensor:
    scales = ue8m0_values(x.device)
    rows = e4m3_values(x.device)[x.int()].unflatten(1, (-1, BLOCK))
    rows = (rows * scales[x_scale.int()][..., None]).flatten(1)
    dtype = torch.float32 if wide else torch.bfloat16
    out = torch.zeros((x.shape[0], weight.shape[1]), dtype=dtype, device=x.device)
    ends = first.clamp(0, x.shape[0]).tolist()
    for expert, (low, high) in enumerate(pairwise(ends)):
        if high <= low:  # its weights are not even decoded
            continue
        values = e2m1_byte_values(x.device)[weight[expert].int()].flatten(1)
        values = values.unflatten(1, (-1, BLOCK)) * scales[weight_scale[expert].int()][..., None]
        out[low:high] = torch.nn.functional.linear(rows[low:high], values.flatten(1)).to(dtype)
    return out
