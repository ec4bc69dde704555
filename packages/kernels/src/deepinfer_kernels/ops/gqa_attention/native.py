"""`gqa_attention` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, check, dense, torch_form
from deepinfer_kernels.native.pages import heads_of_pages
from deepinfer_kernels.ops.gqa_attention.reference import gqa_attention as reference_gqa_attention


def gqa_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    start: Tensor,
    first: Tensor,
    scale: float,
) -> Tensor:
    if torch_form(q.dtype, (q, keys, values), table, start, first):
        return reference_gqa_attention(q, keys, values, table, start, first, scale)
    n, heads, dim = q.shape
    pages, entries, kv_heads, _ = keys.shape
    keys, values = keys.resolve_neg(), values.resolve_neg()
    q, table, start, first = dense(q), dense(table), dense(start), dense(first)
    out = torch.empty_like(q)
    status = LIBRARY.di_gqa_attention(
        CODE[q.dtype],
        q.data_ptr(),
        *heads_of_pages(keys),
        *heads_of_pages(values),
        table.data_ptr(),
        start.data_ptr(),
        first.data_ptr(),
        scale,
        n,
        heads,
        kv_heads,
        dim,
        start.shape[0],
        table.shape[1],
        pages,
        entries,
        out.data_ptr(),
    )
    check(status, "gqa_attention", "a page is outside the cache, or rows and table do not fit")
    return out
