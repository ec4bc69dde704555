"""`add_rms_norm` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.add_rms_norm.reference import add_rms_norm as reference_add_rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if torch_form(x.dtype, (x, residual), weight):
        return reference_add_rms_norm(x, residual, weight, eps)
    x, residual, weight = dense(x), dense(residual), as_dtype(weight, acc_dtype(x.dtype))
    out, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    LIBRARY.di_add_rms_norm(
        CODE[x.dtype],
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        eps,
        x.numel() // width if width else 0,
        width,
        out.data_ptr(),
        total.data_ptr(),
    )
    return out, total
