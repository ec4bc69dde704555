"""`compress_pool` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, dense, torch_form
from deepinfer_kernels.ops.compress_pool.reference import compress_pool as reference_compress_pool


def compress_pool(value: Tensor, gate: Tensor) -> Tensor:
    if torch_form(value.dtype, (value, gate)):
        return reference_compress_pool(value, gate)
    m, r, dim = value.shape
    value, gate = dense(value), dense(gate)
    out = value.new_empty((m, dim), dtype=acc_dtype(value.dtype))
    LIBRARY.di_compress_pool(
        CODE[value.dtype], value.data_ptr(), gate.data_ptr(), m, r, dim, out.data_ptr()
    )
    return out
