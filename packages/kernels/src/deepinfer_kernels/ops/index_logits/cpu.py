"""Index logits as two batched products; selection without a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.ops.index_logits.reference import CHUNK_BYTES


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    sequences, queries, heads, dim = q.shape
    entries = k.shape[1]
    acc = acc_dtype(q.dtype)
    out = torch.empty((sequences, queries, entries), dtype=acc, device=q.device)
    if out.numel() == 0:
        return out
    keys = k.to(acc).transpose(1, 2)
    step = max(1, CHUNK_BYTES // (sequences * heads * entries * acc.itemsize))
    for start in range(0, queries, step):
        rows = slice(start, start + step)
        part = q[:, rows].to(acc)
        scores = torch.bmm(part.reshape(sequences, -1, dim), keys).relu_()
        scores = scores.view(-1, heads, entries)
        weights = w[:, rows].to(acc).reshape(-1, 1, heads)
        out[:, rows] = torch.bmm(weights, scores).view(sequences, -1, entries)
    hidden = torch.arange(entries, device=q.device) >= visible.unsqueeze(-1)
    return out.masked_fill_(hidden, -torch.inf)
