"""`mla_decode_sparse` by FlashMLA: records of 512 channels, fp8 in the window, fp8 or fp4 beside.

The schedule is made anew for each call: a kept one is silently wrong once a length has changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.formats.records import record_bytes
from deepinfer_kernels.ops._vendor import next_best, padded_slots, pages_of
from deepinfer_kernels.vendors import load

LIBRARY = "flash_mla"
FITS = (
    "takes bfloat16, 512 channels, 64 or 128 heads, a window of fp8 records, fp8 or fp4 beside, "
    "and pages that are multiples of a record and of 32 bytes apart"
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
    n, heads, dim = q.shape
    fits = q.dtype is torch.bfloat16 and dim == 512 and heads in (64, 128) and n > 0
    fits = fits and swa_record == "fp8" and extra_record in ("fp8", "fp4")
    swa = extra = None
    if fits:
        swa = _pages(swa_cache, swa_record, swa_entries)
        extra = None if extra_cache is None else _pages(extra_cache, extra_record, extra_entries)
    if swa is None or (extra_cache is not None and extra is None):
        return next_best(
            "mla_decode_sparse", FITS, q, swa_cache, swa_idx, swa_record, extra_cache, extra_idx,
            extra_record, sink, scale, swa_entries, extra_entries,
        )  # fmt: skip
    library = load(LIBRARY)
    out, lse = library.flash_mla_with_kvcache(
        q.contiguous()[:, None],
        swa,
        None,
        None,
        512,
        library.get_mla_metadata()[0],
        softmax_scale=scale,
        indices=padded_slots(swa_idx, swa.shape[0] * swa.shape[1]),
        attn_sink=sink.float(),
        extra_k_cache=extra,
        extra_indices_in_kvcache=None
        if extra is None or extra_idx is None
        else padded_slots(extra_idx, extra.shape[0] * extra.shape[1]),
    )
    return out[:, 0], lse[:, :, 0]


def _pages(cache: Tensor, record: str, entries: int | None) -> Tensor | None:
    width = record_bytes(record, 512, torch.bfloat16)
    return pages_of(cache, cache.shape[1] // width if entries is None else entries, width)
