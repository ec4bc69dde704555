"""`kv_store` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, check, dense, plain
from deepinfer_kernels.native.records import page_records, past, record_code


def kv_store(
    x: Tensor, cache_pages: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    plain(x, cache_pages, slot)
    n, dim = x.shape
    code = record_code(record, dim)
    entries = page_records(cache_pages, record, dim, x.dtype, entries)
    x, slot = dense(x), dense(slot)
    status = LIBRARY.di_kv_store(
        CODE[x.dtype],
        x.data_ptr(),
        cache_pages.data_ptr(),
        slot.data_ptr(),
        n,
        dim,
        cache_pages.shape[0],
        cache_pages.stride(0),
        entries,
        code,
    )
    check(status, "kv_store", past(cache_pages, entries))
