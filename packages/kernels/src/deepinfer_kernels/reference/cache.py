"""Writing and reading cache pages.

A page is one row of a uint8 view; its stride is whatever the allocator chose. Slot ``s`` is entry
``s % entries`` of page ``s // entries``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.formats.quant import pack, unpack
from deepinfer_kernels.formats.records import RecordFormat, record_bytes, record_format


def page_entries(cache: Tensor, record: str, dim: int, dtype: torch.dtype) -> int:
    """Records that fit one page section."""
    return cache.shape[1] // record_bytes(record, dim, dtype)


def _views(
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


def _check_slots(op: str, cache: Tensor, slot: Tensor, entries: int) -> None:
    if slot.numel() and int(slot.max()) >= cache.shape[0] * entries:
        raise IndexError(f"{op}: a slot is past the {cache.shape[0]} pages of {entries} entries")


def kv_store(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    fmt, dim = record_format(record), x.shape[-1]
    entries = page_entries(cache, record, dim, x.dtype) if entries is None else entries
    kept = slot >= 0
    slot = slot[kept]
    _check_slots("kv_store", cache, slot, entries)  # before the first byte is written
    packed = pack(x[kept], record)
    page, place = slot // max(entries, 1), slot % max(entries, 1)
    first = 0
    for view in _views(cache, fmt, dim, x.dtype, entries):
        view[page, place] = packed[:, first : first + view.shape[-1]]
        first += view.shape[-1]


def kv_load(
    cache: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    fmt = record_format(record)
    entries = page_entries(cache, record, dim, dtype) if entries is None else entries
    _check_slots("kv_load", cache, slot, entries)
    present = slot >= 0
    if entries == 0 or cache.shape[0] == 0:
        return torch.zeros((*slot.shape, dim), dtype=dtype, device=cache.device)
    read = slot.clamp(min=0)
    page, place = read // entries, read % entries
    views = _views(cache, fmt, dim, dtype, entries)
    packed = torch.cat([view[page, place] for view in views], dim=-1)
    return unpack(packed, record, dim, dtype).masked_fill(~present.unsqueeze(-1), 0)
