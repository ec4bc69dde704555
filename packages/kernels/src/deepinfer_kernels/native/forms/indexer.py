"""Index logits and exact selection."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.cpu import indexer as cpu_indexer
from deepinfer_kernels.native.forms.call import CODE, LIBRARY, dense, torch_form
from deepinfer_kernels.reference import indexer as reference_indexer


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    if torch_form(q.dtype, q, k, w):
        return cpu_indexer.index_logits(q, k, w, visible)
    sequences, queries, heads, dim = q.shape
    entries = k.shape[1]
    q, k, w, visible = dense(q), dense(k), dense(w), dense(visible)
    out = torch.empty((sequences, queries, entries), dtype=acc_dtype(q.dtype))
    LIBRARY.di_index_logits(
        CODE[q.dtype],
        q.data_ptr(),
        k.data_ptr(),
        w.data_ptr(),
        visible.data_ptr(),
        sequences,
        queries,
        heads,
        dim,
        entries,
        out.data_ptr(),
    )
    return out


def topk_select(x: Tensor, k: int) -> Tensor:
    x = dense(x)
    rows, columns = x.shape
    out = torch.empty((rows, k), dtype=torch.int64)
    LIBRARY.di_topk_select(CODE[x.dtype], x.data_ptr(), rows, columns, k, out.data_ptr())
    return out


def candidate_blocks(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    x, visible = dense(x), dense(visible)
    rows, columns = x.shape
    out = torch.empty((rows, -(-columns // block_size)), dtype=torch.bool)
    LIBRARY.di_candidate_blocks(
        CODE[x.dtype],
        x.data_ptr(),
        visible.data_ptr(),
        rows,
        columns,
        block_size,
        topk_blocks,
        out.data_ptr(),
    )
    return out


def candidate_mask(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    if torch_form(x.dtype, x):
        return reference_indexer.candidate_mask(x, blocks, block_size)
    x, blocks = dense(x), dense(blocks)
    out = torch.empty_like(x)
    LIBRARY.di_candidate_mask(
        CODE[x.dtype],
        x.data_ptr(),
        blocks.data_ptr(),
        x.shape[0],
        x.shape[1],
        block_size,
        out.data_ptr(),
    )
    return out
