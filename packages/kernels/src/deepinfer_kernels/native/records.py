"""How a cache is described to the C++ forms."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.formats.records import record_bytes, record_format

__all__ = ["page_records", "past", "record_code", "source"]

_RECORD = {"fp8": 0, "fp4": 1, "index_fp4": 2, "raw": 3}
"""As the enum Record in cache.h."""


def record_code(record: str, dim: int) -> int:
    record_format(record).check_dim(dim)
    return _RECORD[record]


def page_records(
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
        page_records(cache_pages, record, dim, dtype, entries),
        record_code(record, dim),
    )


def past(cache_pages: Tensor, entries: int) -> str:
    return f"a slot is past the {cache_pages.shape[0]} pages of {entries} entries"
