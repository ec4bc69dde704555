"""`mhc_pre_norm` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops._parts_cpu import NATIVE
from deepinfer_kernels.ops.mhc_pre.native import too_many
from deepinfer_kernels.ops.mhc_pre_norm.reference import composed


def mhc_pre_norm(
    S: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    if too_many(h) or torch_form(S.dtype, (S,), pending, fn, base, scale, norm):
        return composed(NATIVE, S, pending, fn, base, scale, norm, eps, hc_eps, iters)
    acc = acc_dtype(S.dtype)
    streams, pending, norm = dense(S), as_dtype(pending, acc), as_dtype(norm, acc)
    fn, base, scale = as_dtype(fn, acc), as_dtype(base, acc), as_dtype(scale, acc)
    x = S.new_empty((n, width), dtype=S.dtype)
    pre = S.new_empty((n, h), dtype=acc)
    post = S.new_empty((n, h), dtype=acc)
    comb = S.new_empty((n, h, h), dtype=acc)
    LIBRARY.di_mhc_pre_norm(
        CODE[S.dtype],
        streams.data_ptr(),
        pending.data_ptr(),
        fn.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        norm.data_ptr(),
        eps,
        hc_eps,
        iters,
        n,
        h,
        width,
        x.data_ptr(),
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
    )
    return x, pre, post, comb
