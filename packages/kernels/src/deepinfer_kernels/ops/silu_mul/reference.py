"""The gated activation of a fused gate and up projection."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from deepinfer_kernels.accumulate import acc_dtype


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(acc_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)
