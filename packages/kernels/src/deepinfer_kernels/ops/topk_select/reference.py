"""Choosing which compressed entries a query attends to: logits, candidates, exact top-k."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_select(x: Tensor, k: int) -> Tensor:
    rows, columns = x.shape
    ranked = torch.where(x.isnan(), -torch.inf, x)
    values, order = ranked.sort(dim=-1, descending=True, stable=True)
    chosen = order[:, :k].masked_fill(values[:, :k] == -torch.inf, columns)
    chosen = chosen.sort(dim=-1).values  # `columns` marks a free place and sorts last
    padded = torch.full((rows, k), -1, dtype=torch.int64, device=x.device)
    padded[:, : chosen.shape[1]] = torch.where(chosen == columns, -1, chosen)
    return padded
