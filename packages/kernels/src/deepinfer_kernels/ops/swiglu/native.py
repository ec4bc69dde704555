"""`swiglu` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, dense, torch_form
from deepinfer_kernels.ops.swiglu.reference import swiglu as reference_swiglu


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if torch_form(gate.dtype, (gate, up)):
        return reference_swiglu(gate, up, limit)
    gate, up = dense(gate), dense(up)
    out = torch.empty_like(gate)
    LIBRARY.di_swiglu(
        CODE[gate.dtype], gate.data_ptr(), up.data_ptr(), limit, gate.numel(), out.data_ptr()
    )
    return out
