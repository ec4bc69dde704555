"""Weights as GGUF stores them: blocks of 32 along a row, each with its scale, read as they are.

| name | block | value |
| --- | --- | --- |
| q8_0 | float16 d, 32 int8 q | d * q |
| q4_0 | float16 d, 16 bytes: low nibbles are values 0..15, high nibbles 16..31 | d * (q - 8) |
| q4_1 | float16 d, float16 m, 16 bytes likewise | d * q + m |
| bf16 | no blocks | bfloat16 |
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.errors import RecordError

__all__ = [
    "STORED",
    "STORED_BLOCK",
    "int8_rounded",
    "store_weight",
    "stored_row_bytes",
    "widen_weight",
]

STORED_BLOCK = 32
STORED = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
"""Bytes of a block by name; ``bf16`` is stored without blocks."""


def stored_row_bytes(stored: str, channels: int) -> int:
    """Bytes of one weight row.

    Raises RecordError for a record format that is unknown or does not fit.
    """
    if stored == "bf16":
        return 2 * channels
    if stored not in STORED:
        known = ", ".join((*STORED, "bf16"))
        raise RecordError(f"no stored form {stored!r} of a weight; there are: {known}")
    if channels % STORED_BLOCK:
        raise RecordError(f"a {stored} row holds a multiple of 32 channels, got {channels}")
    return channels // STORED_BLOCK * STORED[stored]


def store_weight(weight: Tensor, stored: str) -> Tensor:
    """Weights [rows, channels] to uint8 [rows, bytes], rounded as GGUF's reference rounds them."""
    rows, channels = weight.shape
    width = stored_row_bytes(stored, channels)
    if stored == "bf16":
        return weight.to(torch.bfloat16).contiguous().view(torch.uint8)
    blocks = weight.float().reshape(rows, channels // STORED_BLOCK, STORED_BLOCK)
    if stored == "q8_0":
        d = blocks.abs().amax(-1, keepdim=True) / 127
        q = (blocks * _inverse(d)).round().to(torch.int8)
        return torch.cat([_half(d), q.view(torch.uint8)], dim=-1).view(rows, width)
    if stored == "q4_0":
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        d, header = largest / -8, []
        q = (blocks * _inverse(d) + 8.5).floor().clamp(0, 15)
    else:
        low = blocks.amin(-1, keepdim=True)
        d, header = (blocks.amax(-1, keepdim=True) - low) / 15, [_half(low)]
        q = ((blocks - low) * _inverse(d) + 0.5).floor().clamp(0, 15)
    codes = q.to(torch.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([_half(d), *header, packed], dim=-1).view(rows, width)


def widen_weight(weight: Tensor, stored: str, channels: int, dtype: torch.dtype) -> Tensor:
    """Stored bytes [rows, bytes] to [rows, channels] of a dtype."""
    rows = weight.shape[0]
    if stored == "bf16":
        return weight.contiguous().view(torch.bfloat16).to(dtype)
    blocks = weight.reshape(rows, channels // STORED_BLOCK, STORED[stored])
    d = _from_half(blocks[..., :2], dtype)
    if stored == "q8_0":
        values = d * blocks[..., 2:].contiguous().view(torch.int8).to(dtype)
    else:
        packed = blocks[..., -16:]
        q = torch.cat([packed & 15, packed >> 4], dim=-1).to(dtype)
        values = d * (q - 8) if stored == "q4_0" else d * q + _from_half(blocks[..., 2:4], dtype)
    return values.reshape(rows, channels)


def int8_rounded(x: Tensor) -> Tensor:
    """x [..., channels] in float32, rounded to int8 per 32 channels: what the products see.

    The scale of a block is its largest magnitude / 127. A block with NaN or infinity becomes NaN.
    """
    blocks = x.float().unflatten(-1, (-1, STORED_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # A true division: torch makes `127 / x` of a reciprocal, which rounds twice.
    full = torch.full_like(largest, 127)
    inverse = torch.where(largest > 0, full / largest, 0)
    rounded = (blocks * inverse).round() * (largest / 127)
    return rounded.masked_fill(~largest.isfinite(), torch.nan).flatten(-2)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0, 1 / d)


def _half(d: Tensor) -> Tensor:
    return d.to(torch.float16).flatten().view(torch.uint8).view(*d.shape[:-1], 2)


def _from_half(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.contiguous().view(torch.float16).to(dtype)
