"""Pooling of r consecutive latents into one compressed entry."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def compress_pool(value: Tensor, gate: Tensor) -> Tensor:
    acc = acc_dtype(value.dtype)
    return (torch.softmax(gate.to(acc), dim=1) * value.to(acc)).sum(dim=1)
