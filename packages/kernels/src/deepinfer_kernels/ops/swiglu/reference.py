"""Normalisation, rotary embedding and the gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    acc = acc_dtype(gate.dtype)
    gated = torch.nn.functional.silu(gate.to(acc).clamp(max=limit))
    return (gated * up.to(acc).clamp(-limit, limit)).to(gate.dtype)
