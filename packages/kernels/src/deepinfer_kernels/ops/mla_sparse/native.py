"""`mla_sparse` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, check, dense, torch_form
from deepinfer_kernels.ops.mla_sparse.reference import mla_sparse as reference_mla_sparse


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if torch_form(q.dtype, (q, kv), idx, sink):
        return reference_mla_sparse(q, kv, idx, sink, scale)
    n, heads, dim = q.shape
    acc = acc_dtype(q.dtype)
    q, kv, idx, sink = dense(q), dense(kv), dense(idx), as_dtype(sink, acc)
    out = torch.empty_like(q)
    lse = q.new_empty((n, heads), dtype=acc)
    status = LIBRARY.di_mla_sparse(
        CODE[q.dtype],
        q.data_ptr(),
        kv.data_ptr(),
        idx.data_ptr(),
        sink.data_ptr(),
        scale,
        n,
        heads,
        dim,
        kv.shape[0],
        idx.shape[1],
        out.data_ptr(),
        lse.data_ptr(),
    )
    check(status, "mla_sparse", f"an index is past the {kv.shape[0]} rows of kv")
    return out, lse
