# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`index_topk` in three launches: scores of all rows, the best entries, the best runs.

Nothing is read back from the device: every size is one of the arguments' shapes, and a program past
the end of its row's entries does nothing. A page outside the cache is not read and not chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.index_topk.reference import index_topk as reference_index_topk
from deepinfer_kernels.triton_support.lang import ordered, record_values
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form
from deepinfer_kernels.triton_support.records import record_arguments
from deepinfer_kernels.triton_support.select import radix_threshold, taken_of

SCRATCH_BYTES = 256 << 20
"""Scores held at a time; rows that need more go in parts, three launches each."""
KEYS = 32
"""Entries a program scores: with 64 of 128 channels and 32 heads, 4 warps spill."""


@triton.jit
def index_scores_kernel(
    q, w, cache, table, first, visible, within, scores,
    begin, sequences, width, heads, dim, columns, stride, entries, pages, k, block, blocks, listed,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    WITHIN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    seen = tl.maximum(tl.load(visible + row), 0)
    if WITHIN:
        run = tl.load(within + row * listed + column // block, mask=inside, other=-1)
        entry = run * block + column % block
        present = (run >= 0) & (entry < seen)
        wanted = True
    else:
        entry = column.to(tl.int64)
        present = inside & (entry < seen)
        scored = (seen > k) | ((blocks > 0) & (seen > blocks * block))
        wanted = scored & (tl.program_id(1) * BLOCK < seen)
    if wanted:
        sequence = tl.zeros((), dtype=tl.int64)
        for start in range(0, sequences, 64):
            at = start + tl.arange(0, 64)
            ends = tl.load(first + 1 + at, mask=at < sequences, other=0)
            over = (at < sequences) & (ends <= begin + row)
            sequence += tl.sum(over.to(tl.int64), axis=0)
        place = tl.where(present, entry, 0).to(tl.int32)  # 64 bits divide in a call with a stack
        held = present & (place // entries < width)
        page = tl.load(table + sequence * width + place // entries, mask=held, other=-1)
        held = held & (page >= 0) & (page < pages)
        slot = tl.where(held, page * entries + place % entries, 0)
        cols = tl.arange(0, DIM)
        keys = record_values(
            cache, slot, held, cols, stride, entries, dim, DATA, SCALES, RECORD, ITEM
        ).to(q.dtype.element_ty)
        head = tl.arange(0, HEADS)
        both = (head < heads)[:, None] & (cols < dim)[None, :]
        own = tl.load(q + (row * heads + head[:, None]) * dim + cols[None, :], mask=both, other=0.0)
        if keys.dtype == tl.float32:
            products = tl.dot(own, tl.trans(keys), input_precision="ieee")
        else:
            products = tl.dot(own, tl.trans(keys))
        gain = tl.load(w + row * heads + head, mask=head < heads, other=0.0).to(tl.float32)
        # The comparison keeps a NaN, which a maximum drops.
        summed = tl.sum(tl.where(products <= 0.0, 0.0, products) * gain[:, None], axis=0)
        summed = tl.where(held, summed, float("-inf"))
        tl.store(scores + row * columns + column, summed, mask=inside)


@triton.jit
def index_entries_kernel(
    scores, visible, within, chosen, columns, k, block, listed,
    WITHIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.maximum(tl.load(visible + row), 0), 2147483647).to(tl.int32)
    count = tl.minimum(seen, columns)
    if WITHIN:
        count = tl.zeros((), dtype=tl.int32) + columns
        present = tl.zeros((), dtype=tl.int32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            run = tl.load(within + row * listed + column // block, mask=column < columns, other=-1)
            there = (run >= 0) & (run * block + column % block < seen)
            present += tl.sum(there.to(tl.int32), axis=0)
        many = present > k
    else:
        many = count > k  # else all of them are chosen, unscored
    base = scores + row * columns
    scored = tl.where(many, count, 0)
    threshold, ties = radix_threshold(base, scored, k, BLOCK)
    taken = tl.zeros((), dtype=tl.int32)
    tied = tl.zeros((), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < count
        key = ordered(tl.load(base + column, mask=column < scored, other=float("-inf")))
        best, equal = taken_of(key, threshold, ties, tied)
        if WITHIN:
            run = tl.load(within + row * listed + column // block, mask=inside, other=-1)
            entry = run * block + column % block
            best = tl.where(many, best, (run >= 0) & (entry < seen))
        else:
            entry = column.to(tl.int64)
            best = tl.where(many, best, inside)
        one = best.to(tl.int32)
        place = taken + tl.cumsum(one, axis=0) - one
        tl.store(chosen + row * k + place, entry, mask=best)
        taken += tl.sum(one, axis=0)
        tied += tl.sum(equal, axis=0)
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(chosen + row * k + at, tl.full((BLOCK,), -1, tl.int64), (at >= taken) & (at < k))


@triton.jit
def index_runs_kernel(
    scores, visible, peaks, kept, columns, block, blocks, lowest, highest,
    WIDTH: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.maximum(tl.load(visible + row), 0), columns).to(tl.int32)
    count = (seen + block - 1) // block
    many = count > blocks  # else all of them are kept, unscored
    most = (columns + block - 1) // block
    base = peaks + row * most
    scored = tl.where(many, count, 0)
    for start in range(0, scored, RUNS):
        run = start + tl.arange(0, RUNS)
        peak = tl.full((RUNS,), lowest, dtype=tl.float32)
        for offset in range(0, block, WIDTH):
            part = offset + tl.arange(0, WIDTH)
            entry = run[:, None] * block + part[None, :]
            inside = (part < block)[None, :] & (entry < seen)
            v = tl.load(scores + row * columns + entry, mask=inside, other=lowest)
            peak = tl.maximum(peak, tl.max(tl.where(v != v, lowest, v), axis=1))
        peak = tl.where(run == count - 1, float("inf"), tl.minimum(peak, highest))
        tl.store(base + run, peak, mask=run < count)
    tl.debug_barrier()
    threshold, ties = radix_threshold(base, scored, blocks, BLOCK)
    taken = tl.zeros((), dtype=tl.int32)
    tied = tl.zeros((), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        run = start + tl.arange(0, BLOCK)
        inside = run < count
        key = ordered(tl.load(base + run, mask=run < scored, other=float("-inf")))
        best, equal = taken_of(key, threshold, ties, tied)
        best = tl.where(many, best, inside)
        one = best.to(tl.int32)
        place = taken + tl.cumsum(one, axis=0) - one
        tl.store(kept + row * blocks + place, run.to(tl.int64), mask=best)
        taken += tl.sum(one, axis=0)
        tied += tl.sum(equal, axis=0)
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        rest = (at >= taken) & (at < blocks)
        tl.store(kept + row * blocks + at, tl.full((BLOCK,), -1, tl.int64), rest)


def index_topk(
    q: Tensor,
    w: Tensor,
    cache: Tensor,
    table: Tensor,
    first: Tensor,
    visible: Tensor,
    record: str,
    k: int,
    entries: int | None = None,
    block: int = 8,
    blocks: int = 0,
    within: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if torch_form(q, w):
        return reference_index_topk(
            q, w, cache, table, first, visible, record, k, entries, block, blocks, within
        )
    n, heads, dim = q.shape
    (_, stride, page), constants = record_arguments(cache, record, dim, q.dtype, entries)
    chosen, kept = visible.new_empty((n, k)), visible.new_empty((n, blocks))
    q, w, table, first = q.contiguous(), w.contiguous(), table.contiguous(), first.contiguous()
    listed = 0 if within is None else within.shape[1]
    columns = table.shape[1] * page if within is None else listed * block
    lists = visible if within is None else within.contiguous()
    runs = triton.cdiv(columns, block)
    step = max(1, SCRATCH_BYTES // max(1, 4 * columns))
    wide = min(power_of_two(columns, 16), 1024)
    limits = torch.finfo(torch.float32)
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        seen, own = visible[part].contiguous(), lists[part]
        rows = seen.shape[0]
        scores = q.new_empty((rows, columns), dtype=torch.float32)
        launch(
            index_scores_kernel, (rows, triton.cdiv(columns, KEYS)),
            q[part], w[part], cache, table, first, seen, own, scores,
            begin, table.shape[0], table.shape[1], heads, dim, columns, stride, page,
            cache.shape[0], k, block, blocks, listed,
            WITHIN=within is not None, HEADS=power_of_two(heads, 16), DIM=power_of_two(dim, 16),
            BLOCK=KEYS, **constants,
        )  # fmt: skip
        launch(
            index_entries_kernel, (rows,),
            scores, seen, own, chosen[part], columns, k, block, listed,
            WITHIN=within is not None, BLOCK=wide,
        )  # fmt: skip
        if blocks:
            width = min(power_of_two(block), 1024)
            launch(
                index_runs_kernel, (rows,),
                scores, seen, q.new_empty((rows, runs), dtype=torch.float32), kept[part],
                columns, block, blocks, limits.min, limits.max,
                WIDTH=width, RUNS=1024 // width, BLOCK=min(power_of_two(runs, 16), 1024),
            )  # fmt: skip
    return chosen, kept
