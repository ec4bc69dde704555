"""`mhc_collapse` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.mhc_collapse.reference import mhc_collapse as reference_mhc_collapse


def mhc_collapse(S: Tensor, pre: Tensor) -> Tensor:
    if torch_form(S.dtype, (S,), pre):
        return reference_mhc_collapse(S, pre)
    n, h, width = S.shape
    streams, pre = dense(S), as_dtype(pre, acc_dtype(S.dtype))
    out = S.new_empty((n, width), dtype=S.dtype)
    LIBRARY.di_mhc_collapse(
        CODE[S.dtype], streams.data_ptr(), pre.data_ptr(), n, h, width, out.data_ptr()
    )
    return out
