"""Sparse latent attention: one shared key/value head, an explicit list of keys per query."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.ops.kv_load.reference import kv_load as reference_kv_load
from deepinfer_kernels.ops.mla_sparse.reference import mla_sparse as reference_mla_sparse
from deepinfer_kernels.ops.mla_sparse.reference import rows_per_chunk


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
            reference_kv_load(cache, idx[rows], record, dim, q.dtype, entries)
            for cache, idx, record, entries in sources
        ]
        kv = torch.cat(loaded, dim=1).flatten(0, 1)  # each row's own copies
        present = torch.cat([idx[rows] >= 0 for _, idx, _, _ in sources], dim=1)
        place = torch.arange(kv.shape[0], device=q.device).view_as(present)
        own = torch.where(present, place, -1)
        out[rows], lse[rows] = reference_mla_sparse(q[rows], kv, own, sink, scale)
    return out, lse
