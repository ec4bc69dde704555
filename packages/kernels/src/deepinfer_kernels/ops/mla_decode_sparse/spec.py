"""What `mla_decode_sparse` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import check_pages, floating, integer, require, shape
from deepinfer_kernels.draw import coin, indices, normal, one_of, seeded, size
from deepinfer_kernels.formats.records import record_bytes
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.kv_load.spec import load_args
from deepinfer_kernels.ops.mla_decode_sparse.reference import (
    mla_decode_sparse as reference_mla_decode_sparse,
)
from deepinfer_kernels.registry import Tolerance


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
    """`mla_sparse` straight over cache records: window slots and, optionally, chosen entries.

    q: [n, heads, D]; swa_cache, extra_cache: uint8 [P, section_bytes] as in `kv_store`, with
    records of D channels; swa_idx, extra_idx: int64 [n, W] and [n, K] physical slots, -1 for none;
    sink: [heads]. Without the extra cache give None, None and any record name.
    Returns (out [n, heads, D] like q, lse [n, heads]) with the semantics of `mla_sparse`, the keys
    being the dequantised records. A slot past its cache raises IndexError.
    """
    op = "mla_decode_sparse"
    floating(op, q=q, sink=sink)
    integer(op, swa_idx=swa_idx)
    shape(op, "q", q, (None, None, None))
    n, heads, dim = q.shape
    shape(op, "sink", sink, (heads,))
    shape(op, "swa_idx", swa_idx, (n, None))
    check_pages(op, swa_cache, swa_record, dim, q.dtype, swa_entries)
    require(
        (extra_cache is None) == (extra_idx is None),
        op,
        "extra_cache and extra_idx come together or not at all",
    )
    if extra_cache is not None and extra_idx is not None:
        integer(op, extra_idx=extra_idx)
        shape(op, "extra_idx", extra_idx, (n, None))
        check_pages(op, extra_cache, extra_record, dim, q.dtype, extra_entries)
    return dispatch(
        op,
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


def _aligned(cache: Tensor) -> Tensor:
    """The same pages, a multiple of 32 bytes apart and from a multiple of 32 on, as servers do."""
    pages, width = cache.shape
    apart = -(-width // 32) * 32
    whole = torch.zeros((pages * apart,), dtype=torch.uint8).view(pages, apart)
    whole[:, :width] = cache
    return whole[:, :width]


def _decode_args(
    g: torch.Generator,
    shape: tuple[int, int, int, int, int],
    records: tuple[str, str | None],
    dtype: torch.dtype,
    aligned: bool,
) -> tuple[Any, ...]:
    n, heads, dim, window, chosen = shape
    swa, extra = records
    swa_cache, _, _, _, _, swa_entries = load_args(g, swa, 0, 3, max(window, 1), dim, dtype)
    swa_idx = indices(g, (n, window), 3 * swa_entries, missing=0.2)
    extra_cache = extra_idx = extra_entries = None
    if extra is not None:
        extra_cache, _, _, _, _, extra_entries = load_args(g, extra, 0, 5, 16, dim, dtype)
        extra_idx = indices(g, (n, chosen), 5 * extra_entries, missing=0.2)
    if aligned:
        swa_cache = _aligned(swa_cache)
        extra_cache = None if extra_cache is None else _aligned(extra_cache)
    sink = normal(g, (heads,), acc_dtype(dtype))
    return (
        normal(g, (n, heads, dim), dtype),
        swa_cache,
        swa_idx,
        swa,
        extra_cache,
        extra_idx,
        extra or swa,
        sink,
        dim**-0.5,
        swa_entries,
        extra_entries,
    )


def _decode_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    records = ("fp8", "fp4", "raw", "index_fp4")
    extra = one_of(g, (0, 1, 2, 3, 4))
    shape = (size(g, 0, 5), one_of(g, (1, 6)), one_of(g, (32, 64)), size(g, 0, 20), size(g, 0, 20))
    swa = records[one_of(g, (0, 2))]
    return _decode_args(g, shape, (swa, (*records, None)[extra]), dtype, coin(g))


def _decode_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        "{}x{}x{} of {}+{}".format(*shape): _decode_args(
            seeded(0), shape, ("fp8", "fp4"), dtype, aligned=True
        )
        for shape in ((6, 6, 64, 128, 64), (48, 6, 64, 128, 64), (16, 64, 512, 128, 512))
    }


def _decode_cost(
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
) -> tuple[int, int]:
    heads, dim = q.shape[1:]
    moved, keys = 2 * q.numel() * q.itemsize, 0
    for idx, record in ((swa_idx, swa_record), (extra_idx, extra_record)):
        if idx is not None:
            listed = int((idx >= 0).sum())
            keys += listed
            moved += listed * record_bytes(record, dim, q.dtype)
    return moved, 4 * heads * dim * keys


def _decode_fake(q: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=acc_dtype(q.dtype))


SPEC = describe(
    mla_decode_sparse,
    reference=reference_mla_decode_sparse,
    fake=_decode_fake,
    tags=frozenset({"memory", "compute"}),
    # The stored rows have a spread of 3: a sum's rounding is relative to its largest terms.
    tolerance=Tolerance(float32=(1e-5, 1e-5), bfloat16=(1e-5, 2**-7), float64=(1e-14, 1e-13)),
    cost=_decode_cost,
    cases=_decode_case,
    shapes=_decode_shapes,
    twin=False,
)
