"""Writing and reading cache pages.

A page is one row of a uint8 view; its stride is whatever the allocator chose. Slot ``s`` is entry
``s % entries`` of page ``s // entries``."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.formats.pages import check_slots, page_entries, page_views
from deepinfer_kernels.formats.quant import pack
from deepinfer_kernels.formats.records import record_format


def kv_store(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    fmt, dim = record_format(record), x.shape[-1]
    entries = page_entries(cache, record, dim, x.dtype) if entries is None else entries
    kept = slot >= 0
    slot = slot[kept]
    check_slots("kv_store", cache, slot, entries)  # before the first byte is written
    packed = pack(x[kept], record)
    page, place = slot // max(entries, 1), slot % max(entries, 1)
    first = 0
    for view in page_views(cache, fmt, dim, x.dtype, entries):
        view[page, place] = packed[:, first : first + view.shape[-1]]
        first += view.shape[-1]
