"""Cache records and pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.formats import quant
from deepinfer_kernels.formats.records import record_bytes, record_format
from deepinfer_kernels.native.forms.call import CODE, LIBRARY, check, dense, torch_form
from deepinfer_kernels.reference import compress as reference_compress

_RECORD = {"fp8": 0, "fp4": 1, "index_fp4": 2, "raw": 3}


def compress_pool(value: Tensor, gate: Tensor) -> Tensor:
    if torch_form(value.dtype, value, gate):
        return reference_compress.compress_pool(value, gate)
    m, r, dim = value.shape
    value, gate = dense(value), dense(gate)
    out = torch.empty((m, dim), dtype=acc_dtype(value.dtype))
    LIBRARY.di_compress_pool(
        CODE[value.dtype], value.data_ptr(), gate.data_ptr(), m, r, dim, out.data_ptr()
    )
    return out


def fake_quant(x: Tensor, record: str) -> Tensor:
    if record == "raw" or torch_form(x.dtype, x):
        return quant.fake_quant(x, record)
    dim = x.shape[-1]
    code = record_code(record, dim)
    x = dense(x)
    out = torch.empty_like(x)
    LIBRARY.di_fake_quant(CODE[x.dtype], x.data_ptr(), x.numel() // dim, dim, code, out.data_ptr())
    return out


def record_code(record: str, dim: int) -> int:
    record_format(record).check_dim(dim)
    return _RECORD[record]


def _entries(
    cache_pages: Tensor, record: str, dim: int, dtype: torch.dtype, entries: int | None
) -> int:
    """Records of a page. Checked here too: a wrong layout would write over the next section."""
    fitting = cache_pages.shape[1] // record_bytes(record, dim, dtype)
    if entries is None:
        return fitting
    if entries > fitting:
        raise ShapeError(f"{entries} {record} records asked of a page section, {fitting} fit")
    return entries


def source(
    cache_pages: Tensor,
    idx: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None,
) -> tuple[int | None, ...]:
    """The seven arguments that describe one cache and the slots read from it."""
    return (
        cache_pages.data_ptr(),
        idx.data_ptr(),
        idx.shape[1],
        cache_pages.shape[0],
        cache_pages.stride(0),
        _entries(cache_pages, record, dim, dtype, entries),
        record_code(record, dim),
    )


def kv_store(
    x: Tensor, cache_pages: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    n, dim = x.shape
    code = record_code(record, dim)
    entries = _entries(cache_pages, record, dim, x.dtype, entries)
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
    check(status, "kv_store", _past(cache_pages, entries))


def kv_load(
    cache_pages: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    code = record_code(record, dim)
    entries = _entries(cache_pages, record, dim, dtype, entries)
    slot = dense(slot)
    out = torch.empty((*slot.shape, dim), dtype=dtype)
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
    check(status, "kv_load", _past(cache_pages, entries))
    return out


def _past(cache_pages: Tensor, entries: int) -> str:
    return f"a slot is past the {cache_pages.shape[0]} pages of {entries} entries"
