"""`mhc_pre` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, left_to_torch, torch_form
from deepinfer_kernels.ops.mhc_pre.reference import mhc_pre as reference_mhc_pre

MAX_STREAMS = 8
"""As kMaxStreams in mhc.h."""


def too_many(streams: int) -> bool:
    return streams > MAX_STREAMS and left_to_torch(f"at most {MAX_STREAMS} streams, got {streams}")


def mhc_pre(
    S: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    if too_many(h) or torch_form(S.dtype, (S,), fn, base, scale):
        return reference_mhc_pre(S, fn, base, scale, rms_eps, hc_eps, iters)
    acc = acc_dtype(S.dtype)
    streams, fn, base, scale = (
        dense(S),
        as_dtype(fn, acc),
        as_dtype(base, acc),
        as_dtype(scale, acc),
    )
    pre = S.new_empty((n, h), dtype=acc)
    post = S.new_empty((n, h), dtype=acc)
    comb = S.new_empty((n, h, h), dtype=acc)
    LIBRARY.di_mhc_pre(
        CODE[S.dtype],
        streams.data_ptr(),
        fn.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        rms_eps,
        hc_eps,
        iters,
        n,
        h,
        width,
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
    )
    return pre, post, comb
