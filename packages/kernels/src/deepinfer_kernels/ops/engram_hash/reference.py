"""Engram: hashed n-gram tables and the gate that adds their rows to the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.errors import ShapeError


def engram_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    if bool((primes < 1).any()):
        raise ShapeError("engram_hash: every prime is at least 1")
    running = ids[:, 0] * multipliers[0]
    columns: list[Tensor] = []
    for order in range(1, ids.shape[1]):
        running = running ^ (ids[:, order] * multipliers[order])
        columns.append(running.unsqueeze(-1) % primes[order - 1] + offsets[order - 1])
    return torch.cat(columns, dim=-1)
