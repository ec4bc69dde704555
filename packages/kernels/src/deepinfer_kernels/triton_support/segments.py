"""Rows that lie sorted by expert, cut into tiles that belong to one expert each."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["tiles"]


def tiles(first: Tensor, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """(expert of each tile, its first row), int64 [tiles]; expert -1 for a tile that is not needed.

    first: int64 [E + 1] ascending, the rows of expert e being first[e] .. first[e + 1] - 1. How
    many tiles there are depends on sizes alone, and nothing is read back from the device.
    """
    experts = first.shape[0] - 1
    first = first.clamp(0, rows)
    ends = (first.diff().clamp(min=0) + size - 1).div(size, rounding_mode="floor").cumsum(0)
    tile = torch.arange(-(-rows // size) + experts, device=first.device)
    expert = torch.searchsorted(ends, tile, right=True)
    at = expert.clamp(max=experts - 1)
    before = torch.where(at > 0, ends[at - 1], 0)
    needed = expert < experts
    return torch.where(needed, expert, -1), first[at] + (tile - before) * size
