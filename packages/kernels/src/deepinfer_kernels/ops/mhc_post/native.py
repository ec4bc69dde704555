"""`mhc_post` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.mhc_post.reference import mhc_post as reference_mhc_post


def mhc_post(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if torch_form(S.dtype, (S, y), post, comb):
        return reference_mhc_post(y, S, post, comb)
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
