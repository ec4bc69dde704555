"""Hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.cpu import mhc as cpu_mhc
from deepinfer_kernels.native.forms.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.reference import mhc as reference_mhc

MAX_STREAMS = 8
"""As kMaxStreams in mhc.h."""


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
    if h > MAX_STREAMS or torch_form(S.dtype, S):
        return cpu_mhc.mhc_pre(S, fn, base, scale, rms_eps, hc_eps, iters)
    acc = acc_dtype(S.dtype)
    streams, fn, base, scale = (
        dense(S),
        as_dtype(fn, acc),
        as_dtype(base, acc),
        as_dtype(scale, acc),
    )
    pre = torch.empty((n, h), dtype=acc)
    post = torch.empty((n, h), dtype=acc)
    comb = torch.empty((n, h, h), dtype=acc)
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


def mhc_collapse(S: Tensor, pre: Tensor) -> Tensor:
    if torch_form(S.dtype, S):
        return reference_mhc.mhc_collapse(S, pre)
    n, h, width = S.shape
    streams, pre = dense(S), as_dtype(pre, acc_dtype(S.dtype))
    out = torch.empty((n, width), dtype=S.dtype)
    LIBRARY.di_mhc_collapse(
        CODE[S.dtype], streams.data_ptr(), pre.data_ptr(), n, h, width, out.data_ptr()
    )
    return out


def mhc_post(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if torch_form(S.dtype, S, y):
        return cpu_mhc.mhc_post(y, S, post, comb)
    n, h, width = S.shape
    acc = acc_dtype(S.dtype)
    y, streams, post, comb = dense(y), dense(S), as_dtype(post, acc), as_dtype(comb, acc)
    out = torch.empty_like(streams)
    LIBRARY.di_mhc_post(
        CODE[S.dtype],
        y.data_ptr(),
        streams.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        n,
        h,
        width,
        out.data_ptr(),
    )
    return out
