# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`gqa_attention`: one program a key head and a run of rows of a sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.gqa_attention.reference import gqa_attention as reference_gqa_attention
from deepinfer_kernels.triton_support.lang import attend
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def gqa_attention_kernel(
    q, keys, values, table, starts, first, out, scale,
    key_page, key_entry, key_head, value_page, value_entry, value_head,
    heads, dim, entries, width, pages,
    GROUP: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(first + sequence)
    end = tl.load(first + sequence + 1)
    row = begin + tl.program_id(0) * ROWS  # of the run's first
    if row < end:
        start = tl.load(starts + sequence)
        which = tl.arange(0, M)
        own_row = row + which // GROUP
        inside = (which < ROWS * GROUP) & (own_row < end)
        cols = tl.arange(0, DIM)
        at = (own_row * heads + head * GROUP + which % GROUP)[:, None] * dim + cols[None, :]
        both = inside[:, None] & (cols < dim)[None, :]
        own = tl.load(q + at, mask=both, other=0.0)
        position = start + own_row - begin
        last = start + tl.minimum(row + ROWS, end) - begin  # keys that some row of the run sees
        peak = tl.full((M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((M,), dtype=tl.float32)
        sums = tl.zeros((M, DIM), dtype=tl.float32)
        for at_key in range(0, last, KEYS):
            key = at_key + tl.arange(0, KEYS)
            there = key < last
            page = tl.load(table + sequence * width + key // entries, mask=there, other=0)
            there = there & (page >= 0) & (page < pages)
            entry = key % entries
            mask = there[:, None] & (cols < dim)[None, :]
            k_at = (page * key_page + entry * key_entry + head * key_head)[:, None] + cols[None, :]
            v_at = (page * value_page + entry * value_entry + head * value_head)[:, None]
            k = tl.load(keys + k_at, mask=mask, other=0.0)
            v = tl.load(values + v_at + cols[None, :], mask=mask, other=0.0)
            seen = there[None, :] & (key[None, :] <= position[:, None])
            peak, total, sums = attend(own, k, v, seen, peak, total, sums, scale)
        y = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=both)


def gqa_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    start: Tensor,
    first: Tensor,
    scale: float,
) -> Tensor:
    if torch_form(q, keys, values):
        return reference_gqa_attention(q, keys, values, table, start, first, scale)
    n, heads, dim = q.shape
    pages, entries, kv_heads, _ = keys.shape
    sequences, group = start.shape[0], heads // kv_heads
    q = q.contiguous()
    out = torch.empty_like(q)
    # Few rows a sequence are a decode step. How many each has stays on the device: the grid is the
    # most that any could need, and a program without rows ends at once.
    rows = max(1, (16 if n <= 2 * sequences else 64) // power_of_two(group))
    launch(
        gqa_attention_kernel,
        (triton.cdiv(n, rows), sequences, kv_heads),
        q,
        keys,
        values,
        table.contiguous(),
        start.contiguous(),
        first.contiguous(),
        out,
        scale,
        *keys.stride()[:3],
        *values.stride()[:3],
        heads,
        dim,
        entries,
        table.shape[1],
        pages,
        GROUP=group,
        ROWS=rows,
        M=power_of_two(rows * group, 16),
        DIM=power_of_two(dim, 16),
        KEYS=32,
    )
    return out
