"""Choosing which compressed entries a query attends to: logits, candidates, exact top-k."""

from __future__ import annotations

import torch
from torch import Tensor


def candidate_mask(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    block_size = min(block_size, max(x.shape[1], 1))
    inside = blocks.repeat_interleave(block_size, dim=1)[:, : x.shape[1]]
    return x.masked_fill(~inside, -torch.inf)
