"""Where the records of a cache page lie.

A page is one row of a uint8 view; its stride is whatever the allocator chose. Slot ``s`` is entry
``s % entries`` of page ``s // entries``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.formats.records import RecordFormat, record_bytes

__all__ = ["check_slots", "page_entries", "page_views"]


def page_entries(cache: Tensor, record: str, dim: int, dtype: torch.dtype) -> int:
    """Records that fit one page section."""
    return cache.shape[1] // record_bytes(record, dim, dtype)


def page_views(
    cache: Tensor, fmt: RecordFormat, dim: int, dtype: torch.dtype, entries: int
) -> list[Tensor]:
    """Writable [pages, entries, bytes] views of the pages: one if interleaved, two if sectioned."""
    data, scale = fmt.data_bytes(dim, dtype), fmt.scale_bytes(dim)
    pages, stride, start = cache.shape[0], cache.stride(0), cache.storage_offset()
    if fmt.layout == "interleaved":
        width = data + scale
        return [cache.as_strided((pages, entries, width), (stride, width, 1), start)]
    return [
        cache.as_strided((pages, entries, data), (stride, data, 1), start),
        cache.as_strided((pages, entries, scale), (stride, scale, 1), start + entries * data),
    ]


def check_slots(op: str, cache: Tensor, slot: Tensor, entries: int) -> None:
    """Raise IndexError where a slot is past the cache."""
    if slot.numel() and int(slot.max()) >= cache.shape[0] * entries:
        raise IndexError(f"{op}: a slot is past the {cache.shape[0]} pages of {entries} entries")
