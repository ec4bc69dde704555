"""Number formats of quantised checkpoints, decoded on reading.

Scales are powers of two (UE8M0). FP8 matrices carry one per 32 x 32 block, FP4 matrices and table
rows one per 32 columns of a row, so every product below is exact in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
"""Rows and columns that share one scale."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks_of(size: int) -> int:
    """Scales along an axis of `size`."""
    return -(-size // BLOCK)


def decode_fp8_blocks(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 values [o, i] times UE8M0 scale [ceil(o/32), ceil(i/32)], as [o, i] in `dtype`."""
    work = _work_dtype(dtype)
    rows, columns = values.shape
    wide = scale.to(work).repeat_interleave(BLOCK, dim=1)[:, :columns]
    return values.to(work).mul_(wide.repeat_interleave(BLOCK, dim=0)[:rows]).to(dtype)


def decode_fp8_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 values [..., d] times UE8M0 scale [..., d/32], as [..., d] in `dtype`."""
    work = _work_dtype(dtype)
    return _scaled(values.to(work), scale, dtype)


def decode_fp4_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E2M1 pairs (int8 [o, i/2], even column in the low nibble), scale [o, i/32]: [o, i]."""
    codes = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=_work_dtype(dtype))
    octets = packed.view(torch.uint8)
    nibbles = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
    return _scaled(codes[nibbles.int()], scale, dtype)


def _scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = values.unflatten(-1, (-1, BLOCK))
    return blocks.mul_(scale.to(values.dtype).unsqueeze(-1)).flatten(-2).to(dtype)
