"""`mhc_post_pre_norm` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.mhc_post.native import mhc_post
from deepinfer_kernels.ops.mhc_post_pre_norm.reference import composed
from deepinfer_kernels.ops.mhc_pre.native import too_many
from deepinfer_kernels.ops.mhc_pre_norm.native import mhc_pre_norm


def mhc_post_pre_norm(
    y: Tensor,
    S: Tensor,
    post: Tensor,
    comb: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    if too_many(h) or torch_form(S.dtype, (S, y), post, comb, pending, fn, base, scale, norm):
        return composed(
            mhc_post, mhc_pre_norm,
            y, S, post, comb, pending, fn, base, scale, norm, eps, hc_eps, iters,
        )  # fmt: skip
    acc = acc_dtype(S.dtype)
    y, old, post, comb = dense(y), dense(S), as_dtype(post, acc), as_dtype(comb, acc)
    pending, norm = as_dtype(pending, acc), as_dtype(norm, acc)
    fn, base, scale = as_dtype(fn, acc), as_dtype(base, acc), as_dtype(scale, acc)
    streams = torch.empty_like(old)
    x = S.new_empty((n, width), dtype=S.dtype)
    pre = S.new_empty((n, h), dtype=acc)
    next_post = S.new_empty((n, h), dtype=acc)
    next_comb = S.new_empty((n, h, h), dtype=acc)
    LIBRARY.di_mhc_post_pre_norm(
        CODE[S.dtype],
        y.data_ptr(),
        old.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
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
        streams.data_ptr(),
        x.data_ptr(),
        pre.data_ptr(),
        next_post.data_ptr(),
        next_comb.data_ptr(),
    )
    return streams, x, pre, next_post, next_comb
