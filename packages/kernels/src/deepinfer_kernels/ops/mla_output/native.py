"""`mla_output` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, few_rows
from deepinfer_kernels.ops._parts_cpu import NATIVE
from deepinfer_kernels.ops.mla_output.reference import composed


def mla_output(out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    if not few_rows(out, (wo_a, wo_b), cos, sin):
        return composed(NATIVE, out, cos, sin, wo_a, wo_b)
    acc = acc_dtype(out.dtype)
    n, heads, dim = out.shape
    groups, rank, _ = wo_a.shape
    out, wo_a, wo_b = dense(out), dense(wo_a), dense(wo_b)
    cos, sin = as_dtype(cos, acc), as_dtype(sin, acc)
    y = out.new_empty((n, wo_b.shape[0]), dtype=out.dtype)
    LIBRARY.di_mla_output(
        CODE[out.dtype],
        out.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        wo_a.data_ptr(),
        wo_b.data_ptr(),
        n,
        heads,
        dim,
        cos.shape[1],
        groups,
        rank,
        wo_b.shape[0],
        y.data_ptr(),
    )
    return y
