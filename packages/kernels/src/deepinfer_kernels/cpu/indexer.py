"""Index logits as two batched products; selection without a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.reference.indexer import CHUNK_BYTES
from deepinfer_kernels.reference.indexer import topk_select as sorted_topk_select


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    sequences, queries, heads, dim = q.shape
    entries = k.shape[1]
    acc = acc_dtype(q.dtype)
    out = torch.empty((sequences, queries, entries), dtype=acc)
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
    hidden = torch.arange(entries) >= visible.unsqueeze(-1)
    return out.masked_fill_(hidden, -torch.inf)


def topk_select(x: Tensor, k: int) -> Tensor:
    rows, columns = x.shape
    if x.dtype is torch.float64 or rows == 0 or columns == 0 or k == 0:
        return sorted_topk_select(x, k)
    taken = min(k, columns)
    # One integer key a place: the float's bits, made to order like integers, above the inverted
    # column. Keys are distinct, so the k largest are one set, and ties go to the lower column.
    wide = x.float()
    bits = torch.where(wide.isnan(), -torch.inf, wide + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ordered << 32) | torch.arange(columns - 1, -1, -1)
    best = torch.topk(keys, taken, dim=-1, sorted=False).values
    column = columns - 1 - (best & 0xFFFFFFFF)
    nothing = (best >> 32) == _ORDERED_MINUS_INF
    chosen = column.masked_fill_(nothing, columns).sort(dim=-1).values
    chosen.masked_fill_(chosen == columns, -1)
    return torch.nn.functional.pad(chosen, (0, k - taken), value=-1)


_ORDERED_MINUS_INF = -0x7F800001
"""Bits of -inf (0xFF800000 as int32) after the flip that makes negative floats order."""
