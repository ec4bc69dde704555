"""Sparse latent attention: one shared key/value head, an explicit list of keys per query."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.reference.cache import kv_load

CHUNK_BYTES = 32 << 20
"""Gathered keys and logits of one chunk of query rows together stay near this size."""


def rows_per_chunk(keys: int, heads: int, dim: int, itemsize: int) -> int:
    """Query rows whose gathered keys and logits fit CHUNK_BYTES; at least one."""
    return max(1, CHUNK_BYTES // max(1, keys * (dim + 2 * heads) * itemsize))


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    n, heads, dim = q.shape
    acc = acc_dtype(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((n, heads), dtype=acc, device=q.device)
    step = rows_per_chunk(idx.shape[1], heads, dim, acc.itemsize)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        out[rows], lse[rows] = _attend(q[rows], kv, idx[rows], sink.to(acc), scale)
    return out, lse


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
    n, heads, dim = q.shape
    sources = [(swa_cache, swa_idx, swa_record, swa_entries)]
    if extra_cache is not None and extra_idx is not None:
        sources.append((extra_cache, extra_idx, extra_record, extra_entries))
    keys = sum(idx.shape[1] for _, idx, _, _ in sources)
    acc = acc_dtype(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((n, heads), dtype=acc, device=q.device)
    step = rows_per_chunk(keys, heads, 2 * dim, acc.itemsize)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        loaded = [
            kv_load(cache, idx[rows], record, dim, q.dtype, entries)
            for cache, idx, record, entries in sources
        ]
        kv = torch.cat(loaded, dim=1).flatten(0, 1)  # each row's own copies
        present = torch.cat([idx[rows] >= 0 for _, idx, _, _ in sources], dim=1)
        place = torch.arange(kv.shape[0], device=q.device).view_as(present)
        own = torch.where(present, place, -1)
        out[rows], lse[rows] = mla_sparse(q[rows], kv, own, sink, scale)
    return out, lse


def _attend(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One chunk of rows; sink already in the accumulation dtype."""
    n, heads, _ = q.shape
    if kv.shape[0] == 0 or idx.shape[1] == 0:
        return torch.zeros_like(q), sink.new_full((n, heads), torch.inf)
    present = (idx >= 0).unsqueeze(1)  # [n, 1, K]
    keys = kv[idx.clamp(min=0)].to(sink.dtype)  # [n, K, D]
    # A missing entry reads row 0; if that row holds NaN or inf it must not leak through 0 * NaN.
    keys = keys.masked_fill(~present.squeeze(1).unsqueeze(-1), 0)
    logits = torch.einsum("nhd,nkd->nhk", q.to(sink.dtype), keys) * scale
    logits = logits.masked_fill(~present, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)  # -inf where no key is visible
    empty = ~present.any(dim=-1)
    weights = torch.exp(logits - torch.logaddexp(lse, sink).unsqueeze(-1))
    out = torch.einsum("nhk,nkd->nhd", weights, keys)
    return (
        out.masked_fill(empty.unsqueeze(-1), 0).to(q.dtype),
        lse.masked_fill(empty, torch.inf),
    )
