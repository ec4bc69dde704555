"""`rope` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.rope.reference import rope as reference_rope


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if torch_form(x.dtype, (x,), cos, sin):
        return reference_rope(x, cos, sin, inverse)
    acc = acc_dtype(x.dtype)
    x, cos, sin = dense(x), as_dtype(cos, acc), as_dtype(sin, acc)
    out = torch.empty_like(x)
    n, dim = x.shape[0], x.shape[-1]
    middle = x.numel() // (n * dim) if n and dim else 0
    LIBRARY.di_rope(
        CODE[x.dtype],
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        inverse,
        n,
        middle,
        dim,
        cos.shape[1],
        out.data_ptr(),
    )
    return out
