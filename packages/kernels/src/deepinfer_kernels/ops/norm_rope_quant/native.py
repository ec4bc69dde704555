"""`norm_rope_quant` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.native.records import record_code
from deepinfer_kernels.ops._parts_cpu import NATIVE
from deepinfer_kernels.ops.norm_rope_quant.reference import composed


def norm_rope_quant(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: str
) -> Tensor:
    if torch_form(x.dtype, (x,), weight, cos, sin):
        return composed(NATIVE, x, weight, eps, cos, sin, record)
    acc = acc_dtype(x.dtype)
    n, dim = x.shape
    code = record_code(record, dim)
    x, weight, cos, sin = dense(x), as_dtype(weight, acc), as_dtype(cos, acc), as_dtype(sin, acc)
    out = torch.empty_like(x)
    LIBRARY.di_norm_rope_quant(
        CODE[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        n,
        dim,
        cos.shape[1],
        code,
        out.data_ptr(),
    )
    return out
