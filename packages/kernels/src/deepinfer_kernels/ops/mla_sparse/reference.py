"""Sparse latent attention: one shared key/value head, an explicit list of keys per query."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype

CHUNK_BYTES = 32 << 20
"""Gathered keys and logits of one chunk of query rows together stay near this size."""


def rows_per_chunk(keys: int, heads: int, dim: int, itemsize: int) -> int:
    """Query rows whose gathered keys and logits fit CHUNK_BYTES; at least one."""
    return max(1, CHUNK_BYTES // max(1, keys * (dim + 2 * heads) * itemsize))


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
