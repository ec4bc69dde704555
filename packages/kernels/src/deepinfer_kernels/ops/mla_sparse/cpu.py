"""Sparse attention: gathered products for few queries, one dense product for many."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.ops.mla_sparse.reference import CHUNK_BYTES, rows_per_chunk

DENSE_FROM_QUERIES = 8


DENSE_UP_TO_ROWS_PER_KEY = 3


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    n, heads, dim = q.shape
    rows, keys = kv.shape[0], idx.shape[1]
    acc = acc_dtype(q.dtype)
    sink = sink.to(acc)
    if n == 0 or rows == 0 or keys == 0:
        lse = torch.full((n, heads), torch.inf, dtype=acc, device=q.device)
        return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
    # Many queries over few rows: one product with every row beats a gather for each query.
    dense = n >= DENSE_FROM_QUERIES and rows <= DENSE_UP_TO_ROWS_PER_KEY * keys
    if dense:
        step = max(1, CHUNK_BYTES // (2 * heads * rows * acc.itemsize))
        wide = kv.to(acc)
    else:
        step = rows_per_chunk(keys, heads, dim, acc.itemsize)
        wide = kv
    attend = _dense if dense else _gathered
    if n <= step:
        return attend(q, wide, idx, sink, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((n, heads), dtype=acc, device=q.device)
    for start in range(0, n, step):
        part = slice(start, start + step)
        out[part], lse[part] = attend(q[part], wide, idx[part], sink, scale)
    return out, lse


def _gathered(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    n, keys = idx.shape
    missing = idx < 0
    # A missing entry reads a row this query does attend to, so that stale NaN elsewhere in the
    # cache cannot reach it through 0 * NaN; a query without any key is zeroed at the end.
    read = torch.where(missing, idx.amax(dim=1, keepdim=True).clamp_(min=0), idx)
    gathered = kv.index_select(0, read.reshape(-1)).to(sink.dtype).reshape(n, keys, -1)
    bias = sink.new_zeros((n, 1, keys)).masked_fill_(missing.unsqueeze(1), -torch.inf)
    logits = torch.baddbmm(bias, q.to(sink.dtype), gathered.transpose(1, 2), alpha=scale)
    weights, denominator, lse = _softmax_with_sink(logits, sink)
    out = torch.bmm(weights, gathered).div_(denominator)
    return _without_empty_rows(out.to(q.dtype), lse, missing.all(dim=1))


def _dense(q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n, heads, dim = q.shape
    rows = kv.shape[0]
    missing = idx < 0
    if int(idx.max()) >= rows:
        raise IndexError(f"mla_sparse: idx holds {int(idx.max())}, kv has {rows} rows")
    # How often each row is listed; a row listed twice counts twice, as in the gathered form.
    times = sink.new_zeros((n, rows + 1))
    times.scatter_add_(1, torch.where(missing, rows, idx), torch.ones_like(idx, dtype=sink.dtype))
    listed = times[:, :rows]
    # Rows nobody lists may hold stale NaN, which 0 * NaN would spread to every query.
    kv = torch.where((listed.amax(dim=0) > 0).unsqueeze(-1), kv, 0)
    logits = torch.mm(q.reshape(-1, dim).to(sink.dtype), kv.T).reshape(n, heads, rows)
    logits.mul_(scale).add_(listed.log().unsqueeze(1))
    weights, denominator, lse = _softmax_with_sink(logits, sink)
    out = torch.mm(weights.reshape(-1, rows), kv).reshape(n, heads, dim).div_(denominator)
    return _without_empty_rows(out.to(q.dtype), lse, missing.all(dim=1))


def _softmax_with_sink(logits: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(unnormalised weights, denominator with sink [n, heads, 1], lse without sink [n, heads])."""
    # The peak is the keys' own: under a sink far above them their sum would vanish, and lse with
    # it. exp(sink - peak) may then be inf, and the output goes to its limit, 0.
    peak = logits.amax(dim=-1).clamp_(min=torch.finfo(sink.dtype).min)
    weights = logits.sub_(peak.unsqueeze(-1)).exp_()
    total = weights.sum(dim=-1)
    denominator = total + torch.exp(sink - peak)
    return weights, denominator.unsqueeze_(-1), total.log_().add_(peak)


def _without_empty_rows(out: Tensor, lse: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    return (
        out.masked_fill_(empty.reshape(-1, 1, 1), 0),
        lse.masked_fill_(empty.unsqueeze(-1), torch.inf),
    )
