"""`index_topk` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, check, dense, torch_form
from deepinfer_kernels.native.records import page_records, record_code
from deepinfer_kernels.ops.index_topk.reference import index_topk as reference_index_topk


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
    if torch_form(q.dtype, (q, w), cache, table, first, visible, within):
        return reference_index_topk(
            q, w, cache, table, first, visible, record, k, entries, block, blocks, within
        )
    n, heads, dim = q.shape
    q, w, table, first, visible = dense(q), dense(w), dense(table), dense(first), dense(visible)
    within = None if within is None else dense(within)
    chosen = visible.new_empty((n, k))
    kept = visible.new_empty((n, blocks))
    status = LIBRARY.di_index_topk(
        CODE[q.dtype],
        q.data_ptr(),
        w.data_ptr(),
        cache.data_ptr(),
        table.data_ptr(),
        first.data_ptr(),
        visible.data_ptr(),
        None if within is None else within.data_ptr(),
        n,
        first.shape[0] - 1,
        table.shape[1],
        heads,
        dim,
        cache.shape[0],
        cache.stride(0),
        page_records(cache, record, dim, q.dtype, entries),
        record_code(record, dim),
        k,
        block,
        blocks,
        0 if within is None else within.shape[1],
        chosen.data_ptr(),
        kept.data_ptr(),
    )
    check(status, "index_topk", "a page is outside the cache, or rows and table do not fit")
    return chosen, kept
