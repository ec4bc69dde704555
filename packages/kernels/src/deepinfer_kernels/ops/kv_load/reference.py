"""Writing and reading cache pages.

A page is one row of a uint8 view; its stride is whatever the allocator chose. Slot ``s`` is entry
``s % entries`` of page ``s // entries``."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.formats.pages import check_slots, page_entries, page_views
from deepinfer_kernels.formats.quant import unpack
from deepinfer_kernels.formats.records import record_format


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
    check_slots("kv_load", cache, slot, entries)
    present = slot >= 0
    if entries == 0 or cache.shape[0] == 0:
        return torch.zeros((*slot.shape, dim), dtype=dtype, device=cache.device)
    read = slot.clamp(min=0)
    page, place = read // entries, read % entries
    views = page_views(cache, fmt, dim, dtype, entries)
    packed = torch.cat([view[page, place] for view in views], dim=-1)
    return unpack(packed, record, dim, dtype).masked_fill(~present.unsqueeze(-1), 0)
