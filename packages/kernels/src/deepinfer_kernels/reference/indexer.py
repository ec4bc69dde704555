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


def topk_select(x: Tensor, k: int) -> Tensor:
    rows, columns = x.shape
    ranked = torch.where(x.isnan(), -torch.inf, x)
    values, order = ranked.sort(dim=-1, descending=True, stable=True)
    chosen = order[:, :k].masked_fill(values[:, :k] == -torch.inf, columns)
    chosen = chosen.sort(dim=-1).values  # `columns` marks a free place and sorts last
    padded = torch.full((rows, k), -1, dtype=torch.int64, device=x.device)
    padded[:, : chosen.shape[1]] = torch.where(chosen == columns, -1, chosen)
    return padded


def candidate_blocks(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    rows, entries = x.shape
    blocks = -(-entries // block_size)
    if blocks == 0:
        return torch.zeros((rows, 0), dtype=torch.bool, device=x.device)
    visible = visible.clamp(0, entries).unsqueeze(-1)
    hidden = torch.arange(entries, device=x.device) >= visible
    limits = torch.finfo(x.dtype)
    # Clamped to finite, so that +inf is the newest block's alone and -inf means "nothing visible".
    scores = x.clamp(limits.min, limits.max).masked_fill(hidden, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, blocks * block_size - entries), value=-torch.inf)
    best = scores.view(rows, blocks, block_size).amax(dim=-1)
    newest = torch.arange(blocks, device=x.device) == (visible - 1).div(
        block_size, rounding_mode="floor"
    )
    best = best.masked_fill(newest, torch.inf)
    values, order = best.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros((rows, blocks), dtype=torch.bool, device=x.device)
    return kept.scatter(1, order[:, :topk_blocks], values[:, :topk_blocks] > -torch.inf)


def candidate_mask(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    inside = blocks.repeat_interleave(block_size, dim=1)[:, : x.shape[1]]
    return x.masked_fill(~inside, -torch.inf)
