"""What `gqa_attention` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import check_head_pages, floating, integer, require, shape
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.gqa_attention.reference import gqa_attention as reference_gqa_attention
from deepinfer_kernels.registry import Tolerance


def gqa_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    start: Tensor,
    first: Tensor,
    scale: float,
) -> Tensor:
    """Causal grouped-query attention of the rows of several sequences over their cached pages.

    Prefill, chunks and decode are one call: nothing is padded, and the cost is the sum of the
    sequences' own. q: [n, heads, D], the rows of sequence s being first[s] .. first[s + 1] - 1;
    keys, values: [P, B, kv_heads, D] of q's dtype with any outer strides, kv_heads divides heads;
    table: int64 [S, T] pages of each sequence in order, what it does not need is not read;
    start: int64 [S] position of its first row; first: int64 [S + 1], from 0 to n.
    A row at position p sees the keys 0 .. p of its sequence, its own included. A page outside the
    cache raises IndexError. Returns [n, heads, D] like q.
    """
    op = "gqa_attention"
    floating(op, q=q)
    integer(op, table=table, start=start, first=first)
    shape(op, "q", q, (None, None, None))
    check_head_pages(op, keys, values, q.shape[2], q.dtype)
    heads, kv_heads = q.shape[1], keys.shape[2]
    require(heads % kv_heads == 0, op, f"{kv_heads} key heads divide the heads of q, got {heads}")
    require(keys.shape[1] >= 1, op, "a page holds at least one entry")
    shape(op, "start", start, (None,))
    shape(op, "first", first, (start.shape[0] + 1,))
    shape(op, "table", table, (start.shape[0], None))
    return dispatch(op, q, keys, values, table, start, first, scale)


def _args(
    g: torch.Generator,
    parts: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    entries: int,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """``parts``: (tokens already there, new rows) of each sequence."""
    own, kv, dim = heads
    used = [-(-(past + rows) // entries) for past, rows in parts]
    pages = torch.randperm(sum(used) + 1, generator=g)
    table = torch.full((len(parts), max(used, default=0)), -1)
    for s, ids in enumerate(pages[: sum(used)].split(used)) if used else ():
        table[s, : used[s]] = ids
    blocks = normal(g, (len(pages), 2, entries, kv, dim), dtype)
    rows = torch.tensor([0, *(count for _, count in parts)], dtype=torch.int64)
    return (
        normal(g, (int(rows.sum()), own, dim), dtype),
        blocks[:, 0],
        blocks[:, 1],
        table,
        torch.tensor([past for past, _ in parts], dtype=torch.int64),
        rows.cumsum(0),
        dim**-0.5,
    )


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    kv, dim = size(g, 1, 3), one_of(g, (8, 33, 64))
    parts = [
        (one_of(g, (0, 1, 15, 16, 40)), one_of(g, (0, 1, 1, 5, 18))) for _ in range(size(g, 0, 4))
    ]
    return _args(g, parts, (kv * size(g, 1, 4), kv, dim), one_of(g, (1, 7, 16)), dtype)


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    wanted = {
        "decode 1 of 300": [(299, 1)],
        "decode 32 of 300": [(299, 1)] * 32,
        "ragged decode": [(2000, 1), *[(30, 1)] * 7],
        "prefill 256": [(0, 256)],
    }
    return {
        label: _args(seeded(0), parts, (9, 3, 64), 128, dtype) for label, parts in wanted.items()
    }


def _cost(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, start: Tensor, first: Tensor, *rest: Any
) -> tuple[int, int]:
    rows = first[1:] - first[:-1]
    seen = int((rows * start + rows * (rows + 1) // 2).sum())
    read = int((start + rows).sum()) * 2 * keys.shape[2] * q.shape[2]
    return (2 * q.numel() + read) * q.itemsize, 4 * q.shape[1] * q.shape[2] * seen


SPEC = describe(
    gqa_attention,
    reference=reference_gqa_attention,
    fake=like_first,
    tags=frozenset({"memory", "compute"}),
    tolerance=Tolerance(float32=(1e-5, 1e-5), bfloat16=(1e-5, 2**-7), float64=(1e-14, 1e-13)),
    cost=_cost,
    cases=_case,
    shapes=_shapes,
)
