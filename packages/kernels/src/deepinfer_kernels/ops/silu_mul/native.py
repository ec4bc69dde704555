"""`silu_mul` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, dense, torch_form
from deepinfer_kernels.ops.silu_mul.reference import silu_mul as reference_silu_mul


def silu_mul(gate_up: Tensor) -> Tensor:
    if torch_form(gate_up.dtype, (gate_up,)):
        return reference_silu_mul(gate_up)
    gate_up, width = dense(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    rows = out.numel() // width if width else 0
    LIBRARY.di_silu_mul(CODE[gate_up.dtype], gate_up.data_ptr(), rows, width, out.data_ptr())
    return out
