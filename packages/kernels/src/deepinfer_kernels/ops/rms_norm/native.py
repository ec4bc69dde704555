"""`rms_norm` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.rms_norm.reference import rms_norm as reference_rms_norm


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if torch_form(x.dtype, (x,), weight):
        return reference_rms_norm(x, weight, eps)
    x, width = dense(x), x.shape[-1]
    weight = None if weight is None else as_dtype(weight, acc_dtype(x.dtype))
    pointer = None if weight is None else weight.data_ptr()
    out = torch.empty_like(x)
    rows = x.numel() // width if width else 0
    LIBRARY.di_rms_norm(CODE[x.dtype], x.data_ptr(), pointer, eps, rows, width, out.data_ptr())
    return out
