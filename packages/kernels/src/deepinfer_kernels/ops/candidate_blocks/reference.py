"""Choosing which compressed entries a query attends to: logits, candidates, exact top-k."""

from __future__ import annotations

import torch
from torch import Tensor


def candidate_blocks(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    rows, entries = x.shape
    block_size = min(block_size, max(entries, 1))
    blocks = -(-entries // block_size)
    if blocks == 0:
        return torch.zeros((rows, 0), dtype=torch.bool, device=x.device)
    visible = visible.clamp(0, entries).unsqueeze(-1)
    hidden = torch.arange(entries, device=x.device) >= visible
    limits = torch.finfo(x.dtype)
    x = torch.where(x.isnan(), -torch.inf, x)  # counts for nothing, as in topk_select
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
