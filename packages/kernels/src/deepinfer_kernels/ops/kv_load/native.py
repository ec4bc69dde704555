"""`kv_load` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, check, dense, plain
from deepinfer_kernels.native.records import page_records, past, record_code


def kv_load(
    cache_pages: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    plain(cache_pages, slot)
    code = record_code(record, dim)
    entries = page_records(cache_pages, record, dim, dtype, entries)
    slot = dense(slot)
    out = slot.new_empty((*slot.shape, dim), dtype=dtype)
    status = LIBRARY.di_kv_load(
        CODE[dtype],
        cache_pages.data_ptr(),
        slot.data_ptr(),
        slot.numel(),
        dim,
        cache_pages.shape[0],
        cache_pages.stride(0),
        entries,
        code,
        out.data_ptr(),
    )
    check(status, "kv_load", past(cache_pages, entries))
    return out
