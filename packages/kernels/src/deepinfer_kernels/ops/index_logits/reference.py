"""Choosing which compressed entries a query attends to: logits, candidates, exact top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype

CHUNK_BYTES = 32 << 20


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    sequences, queries, heads, _ = q.shape
    entries = k.shape[1]
    acc = acc_dtype(q.dtype)
    out = torch.empty((sequences, queries, entries), dtype=acc, device=q.device)
    keys = k.to(acc)
    step = max(1, CHUNK_BYTES // max(1, sequences * heads * entries * acc.itemsize))
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        scores = torch.einsum("sqhd,sed->sqhe", q[:, rows].to(acc), keys).relu()
        out[:, rows] = (scores * w[:, rows].to(acc).unsqueeze(-1)).sum(dim=2)
    hidden = torch.arange(entries, device=q.device) >= visible.unsqueeze(-1)
    return out.masked_fill(hidden, -torch.inf)
