# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`mla_decode_sparse` for compute capability 10.0: 64 heads a program, sums in tensor memory.

A tile of 64 heads reaches the unit that sums in tensor memory. Its outputs, 64 x 512 numbers beside
the logits, are more than its columns hold: so two programs share a row, each with half of the value
channels. Both compute the logits, and the second reads the records from the cache of the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.mla_decode_sparse.triton import (
    mla_decode_sparse as triton_mla_decode_sparse,
)
from deepinfer_kernels.triton_support.lang import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    record_values,
    with_sink,
)
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form
from deepinfer_kernels.triton_support.records import record_arguments

LINE = 16
"""Bytes that a page's stride is a multiple of, for this form."""


@triton.jit
def narrow_values(
    cache, slot, present, start, stride, entries, dim,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    KEYS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """bfloat16 [KEYS, COLS], the channels from ``start`` on: every decoded value is a bfloat16.

    A scale is loaded once for its block, where `record_values` loads it for every channel.
    """
    if RECORD >= 2:
        cols = start + tl.arange(0, COLS)
        return record_values(
            cache, slot, present, cols, stride, entries, dim, DATA, SCALES, RECORD, ITEM
        ).to(tl.bfloat16)
    else:
        slot = slot.to(tl.int32)
        data = (slot // entries).to(tl.int64) * stride + slot % entries * (DATA + SCALES)
        BLOCK: tl.constexpr = 16 if RECORD == 1 else 32
        block = start // BLOCK + tl.arange(0, COLS // BLOCK)
        inside = present[:, None] & (block * BLOCK < dim)[None, :]
        scale = tl.load(cache + data[:, None] + DATA + block[None, :], mask=inside, other=0)
        if RECORD == 0:
            at = start + tl.arange(0, COLS)
            both = present[:, None] & (at < dim)[None, :]
            code = tl.load(cache + data[:, None] + at[None, :], mask=both, other=0)
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            power = decode_ue8m0(scale.to(tl.int32))
        else:
            at = start // 2 + tl.arange(0, COLS // 2)
            both = present[:, None] & (at * 2 < dim)[None, :]
            pair = tl.load(cache + data[:, None] + at[None, :], mask=both, other=0).to(tl.int32)
            value = tl.reshape(
                tl.join(decode_e2m1(pair & 15), decode_e2m1(pair >> 4)), (KEYS, COLS)
            )
            power = decode_e4m3(scale.to(tl.int32))
        value = tl.reshape(value, (KEYS, COLS // BLOCK, BLOCK))
        value = tl.where(inside[:, :, None], value * power[:, :, None], 0.0).to(tl.bfloat16)
        return tl.reshape(value, (KEYS, COLS))


@triton.jit
def half_step(
    own, cache, idx, row, part, dim, lines, entries, slots, keys, peak, total, sums, scale,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    for start in range(0, keys, KEYS):
        place = start + tl.arange(0, KEYS)
        listed = tl.load(idx + row * keys + place, mask=place < keys, other=-1)
        present = (listed >= 0) & (listed < slots)
        read = tl.where(present, listed, 0)
        stride = lines * 16  # said so, 16 bytes are loaded at a time
        k = narrow_values(
            cache, read, present, 0, stride, entries, dim, DATA, SCALES, RECORD, ITEM, KEYS, DIM
        )
        v = narrow_values(
            cache, read, present, part, stride, entries, dim, DATA, SCALES, RECORD, ITEM,
            KEYS, PART,
        )  # fmt: skip
        logits = tl.where(present[None, :], tl.dot(own, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(peak, tl.max(logits, axis=1))
        bound = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(logits - bound[:, None])
        shrink = tl.exp(peak - bound)
        total = total * shrink + tl.sum(weights, axis=1)
        high = weights.to(tl.bfloat16)  # in two parts, as in `attend`
        sums = tl.dot(high, v, sums * shrink[:, None])
        sums = tl.dot((weights - high.to(tl.float32)).to(tl.bfloat16), v, sums)
        peak = new
    return peak, total, sums


@triton.jit
def mla_decode_sparse_sm100_kernel(
    q, swa, swa_idx, extra, extra_idx, sink, out, lse, rows, heads, dim, scale,
    swa_stride, swa_entries, swa_slots, swa_keys,
    extra_stride, extra_entries, extra_slots, extra_keys,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    DATA2: tl.constexpr, SCALES2: tl.constexpr, RECORD2: tl.constexpr,
    HAS_EXTRA: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    part = tl.program_id(2) * (DIM // PARTS)
    own_cols = part + tl.arange(0, DIM // PARTS)
    at = (row * heads + head[:, None]) * dim
    # Straight to shared memory: 64 x 512 numbers that pass through registers would not fit there.
    arriving = tl.make_tensor_descriptor(
        q, shape=[rows * heads, dim], strides=[dim, 1], block_shape=[HEADS, DIM]
    )
    own = arriving.load([(row * heads).to(tl.int32) + tl.program_id(1) * HEADS, 0])
    peak = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    sums = tl.zeros((HEADS, DIM // PARTS), dtype=tl.float32)
    peak, total, sums = half_step(
        own, swa, swa_idx, row, part, dim, swa_stride, swa_entries, swa_slots, swa_keys,
        peak, total, sums, scale, DATA, SCALES, RECORD, ITEM, KEYS, DIM, DIM // PARTS,
    )  # fmt: skip
    if HAS_EXTRA:
        peak, total, sums = half_step(
            own, extra, extra_idx, row, part, dim, extra_stride, extra_entries,
            extra_slots, extra_keys, peak, total, sums, scale,
            DATA2, SCALES2, RECORD2, ITEM, KEYS, DIM, DIM // PARTS,
        )  # fmt: skip
    ends = tl.load(sink + head, mask=head < heads, other=0.0).to(tl.float32)
    y, logs = with_sink(peak, total, sums, ends)
    kept = (head < heads)[:, None] & (own_cols < dim)[None, :]
    tl.store(out + at + own_cols[None, :], y.to(out.dtype.element_ty), mask=kept)
    if part == 0:
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
    aligned = all(
        cache is None or (cache.stride(0) % LINE == 0 and cache.data_ptr() % LINE == 0)
        for cache in (swa_cache, extra_cache)
    )
    if torch_form(q, sink) or q.dtype is not torch.bfloat16 or not aligned:
        return triton_mla_decode_sparse(
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
        mla_decode_sparse_sm100_kernel,
        (n, triton.cdiv(heads, 64), 2),
        q,
        swa_cache,
        swa_idx.contiguous(),
        extra_cache,
        extra_idx.contiguous(),
        sink.contiguous(),
        out,
        lse,
        n,
        heads,
        dim,
        scale,
        one[1] // LINE,
        one[2],
        swa_cache.shape[0] * one[2],
        swa_idx.shape[1],
        two[1] // LINE,
        two[2],
        extra_cache.shape[0] * two[2],
        extra_idx.shape[1],
        DATA2=second["DATA"],
        SCALES2=second["SCALES"],
        RECORD2=second["RECORD"],
        HAS_EXTRA=has_extra,
        HEADS=64,
        DIM=power_of_two(dim, 64),  # a half holds whole blocks
        PARTS=2,
        KEYS=16,  # 32 spill unless the loop is not pipelined
        num_warps=8,
        descriptors=True,
        **first,
    )
    return out, lse
