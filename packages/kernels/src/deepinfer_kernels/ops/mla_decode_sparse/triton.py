# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`mla_decode_sparse`: as `mla_sparse`, the keys decoded from their records."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.mla_decode_sparse.reference import (
    mla_decode_sparse as reference_mla_decode_sparse,
)
from deepinfer_kernels.triton_support.lang import attend, record_values, with_sink
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form
from deepinfer_kernels.triton_support.records import record_arguments


@triton.jit
def source_step(
    own, cache, idx, row, cols, dim, stride, entries, slots, keys, peak, total, sums, scale,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    for start in range(0, keys, KEYS):
        place = start + tl.arange(0, KEYS)
        listed = tl.load(idx + row * keys + place, mask=place < keys, other=-1)
        present = (listed >= 0) & (listed < slots)
        read = tl.where(present, listed, 0)
        v = record_values(
            cache, read, present, cols, stride, entries, dim, DATA, SCALES, RECORD, ITEM
        ).to(own.dtype)
        seen = present[None, :] & (peak < float("inf"))[:, None]
        peak, total, sums = attend(own, v, v, seen, peak, total, sums, scale)
    return peak, total, sums


@triton.jit
def mla_decode_sparse_kernel(
    q, swa, swa_idx, extra, extra_idx, sink, out, lse, heads, dim, scale,
    swa_stride, swa_entries, swa_slots, swa_keys,
    extra_stride, extra_entries, extra_slots, extra_keys,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    DATA2: tl.constexpr, SCALES2: tl.constexpr, RECORD2: tl.constexpr,
    HAS_EXTRA: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, DIM)
    at = (row * heads + head[:, None]) * dim + cols[None, :]
    both = (head < heads)[:, None] & (cols < dim)[None, :]
    own = tl.load(q + at, mask=both, other=0.0)
    peak = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    sums = tl.zeros((HEADS, DIM), dtype=tl.float32)
    peak, total, sums = source_step(
        own, swa, swa_idx, row, cols, dim, swa_stride, swa_entries, swa_slots, swa_keys,
        peak, total, sums, scale, DATA, SCALES, RECORD, ITEM, KEYS,
    )  # fmt: skip
    if HAS_EXTRA:
        peak, total, sums = source_step(
            own, extra, extra_idx, row, cols, dim, extra_stride, extra_entries, extra_slots,
            extra_keys, peak, total, sums, scale, DATA2, SCALES2, RECORD2, ITEM, KEYS,
        )  # fmt: skip
    ends = tl.load(sink + head, mask=head < heads, other=0.0).to(tl.float32)
    y, logs = with_sink(peak, total, sums, ends)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=both)
    tl.store(lse + row * heads + head, logs, mask=head < heads)


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
    if torch_form(q, sink):
        return reference_mla_decode_sparse(
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
    n, heads, dim = q.shape
    q = q.contiguous()
    out, lse = torch.empty_like(q), q.new_empty((n, heads), dtype=torch.float32)
    has_extra = extra_cache is not None and extra_idx is not None
    if extra_cache is None or extra_idx is None:
        extra_cache, extra_idx, extra_record = swa_cache, swa_idx, swa_record
        extra_entries = swa_entries
    one, first = record_arguments(swa_cache, swa_record, dim, q.dtype, swa_entries)
    two, second = record_arguments(extra_cache, extra_record, dim, q.dtype, extra_entries)
    launch(
        mla_decode_sparse_kernel,
        (n, triton.cdiv(heads, 16)),
        q,
        swa_cache,
        swa_idx.contiguous(),
        extra_cache,
        extra_idx.contiguous(),
        sink.contiguous(),
        out,
        lse,
        heads,
        dim,
        scale,
        one[1],
        one[2],
        swa_cache.shape[0] * one[2],
        swa_idx.shape[1],
        two[1],
        two[2],
        extra_cache.shape[0] * two[2],
        extra_idx.shape[1],
        DATA2=second["DATA"],
        SCALES2=second["SCALES"],
        RECORD2=second["RECORD"],
        HAS_EXTRA=has_extra,
        HEADS=16,
        DIM=power_of_two(dim, 16),
        KEYS=16,  # more decoded keys, or 4 warps, and registers spill
        num_warps=8,
        **first,
    )
    return out, lse
