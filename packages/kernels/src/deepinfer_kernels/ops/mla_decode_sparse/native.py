"""`mla_decode_sparse` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, check, dense, torch_form
from deepinfer_kernels.native.records import source
from deepinfer_kernels.ops.mla_decode_sparse.reference import (
    mla_decode_sparse as reference_mla_decode_sparse,
)


def mla_decode_sparse(
    q: Tensor,
    swa_cache: Tensor,
    swa_idx: Tensor,
    swa_record: str,
    extra_cache: Tensor | None,
    extra_idx: Tensor | None,
    extra_record: str,
    sink: Tensor,
    scale: float,
    swa_entries: int | None = None,
    extra_entries: int | None = None,
) -> tuple[Tensor, Tensor]:
    if torch_form(q.dtype, (q,), swa_cache, swa_idx, extra_cache, extra_idx, sink):
        return reference_mla_decode_sparse(
            q,
            swa_cache,
            swa_idx,
            swa_record,
            extra_cache,
            extra_idx,
            extra_record,
            sink,
            scale,
            swa_entries,
            extra_entries,
        )
    n, heads, dim = q.shape
    acc = acc_dtype(q.dtype)
    q, swa_idx, sink = dense(q), dense(swa_idx), as_dtype(sink, acc)
    extra = (None, None, 0, 0, 0, 0, 0)
    if extra_cache is not None and extra_idx is not None:
        extra_idx = dense(extra_idx)
        extra = source(extra_cache, extra_idx, extra_record, dim, q.dtype, extra_entries)
    out = torch.empty_like(q)
    lse = q.new_empty((n, heads), dtype=acc)
    status = LIBRARY.di_mla_decode_sparse(
        CODE[q.dtype],
        q.data_ptr(),
        *source(swa_cache, swa_idx, swa_record, dim, q.dtype, swa_entries),
        *extra,
        sink.data_ptr(),
        scale,
        n,
        heads,
        dim,
        out.data_ptr(),
        lse.data_ptr(),
    )
    check(status, "mla_decode_sparse", "a slot is past its cache")
    return out, lse
