"""Weights as GGUF stores them: blocks of 32 along a row, each with its scale, read as they are.

| name | block | value |
| --- | --- | --- |
| q8_0 | float16 d, 32 int8 q | d * q |
| q4_0 | float16 d, 16 bytes: low nibbles are values 0..15, high nibbles 16..31 | d * (q - 8) |
| q4_1 | float16 d, float16 m, 16 bytes likewise | d * q + m |
| bf16 | no blocks | bfloat16 |

`q8_0x16`, `q4_0x16` and `q4_1x16` are the same bytes with rows packed by 16, for products on CPUs:
block by block the 16 scales, the 16 offsets of q4_1, then 4 bytes of each row in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.errors import RecordError

__all__ = [
    "PACKED",
    "STORED",
    "STORED_BLOCK",
    "int8_rounded",
    "pack_weight",
    "plain_form",
    "store_weight",
    "stored_row_bytes",
    "unpack_weight",
    "widen_weight",
]

STORED_BLOCK = 32
STORED = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
"""Bytes of a block by name; ``bf16`` is stored without blocks."""
PACKED = "x16"
"""Ends the name of a form whose rows are packed by 16."""


def plain_form(stored: str) -> str:
    """The form without its packing."""
    return stored.removesuffix(PACKED)


def pack_weight(weight: Tensor, stored: str) -> Tensor:
    """Plain rows [rows, bytes], packed by 16; of the same shape.

    Raises RecordError unless the rows are a multiple of 16 and stored in blocks.
    """
    groups = _in_fields(weight, stored, packed=False)
    parts = [part.permute(0, 2, 3, 1, 4) for part in groups]  # [groups, blocks, ., 16, .]
    return torch.cat([p.flatten(2) for p in parts], dim=2).reshape(weight.shape).contiguous()


def unpack_weight(weight: Tensor, stored: str) -> Tensor:
    """The inverse of `pack_weight`; stored: the packed form's name."""
    groups = _in_fields(weight, plain_form(stored), packed=True)
    parts = [part.permute(0, 3, 1, 2, 4) for part in groups]  # [groups, 16, blocks, ., .]
    return torch.cat([p.flatten(3) for p in parts], dim=3).reshape(weight.shape).contiguous()


def _in_fields(weight: Tensor, stored: str, *, packed: bool) -> list[Tensor]:
    """Scales, offsets and bytes: plain [groups, 16, blocks, pieces, width of a piece], packed
    [groups, blocks, pieces, 16, width]."""
    rows, width = weight.shape
    if rows % 16 or stored not in STORED:
        raise RecordError(f"16 rows of {', '.join(STORED)} are packed, got {rows} of {stored!r}")
    size = STORED[stored]
    head = 2 if stored == "q4_1" else 1
    blocks = width // size
    if packed:
        whole = weight.reshape(rows // 16, blocks, 16 * size)
        first = whole[..., : 32 * head].unflatten(-1, (head, 16, 2))
        rest = whole[..., 32 * head :].unflatten(-1, (-1, 16, 4))
    else:
        whole = weight.reshape(rows // 16, 16, blocks, size)
        first = whole[..., : 2 * head].unflatten(-1, (head, 2))
        rest = whole[..., 2 * head :].unflatten(-1, (-1, 4))
    return [first, rest]


def stored_row_bytes(stored: str, channels: int) -> int:
    """Bytes of one weight row; of packed rows their share.

    Raises RecordError for a record format that is unknown or does not fit.
    """
    stored = plain_form(stored)
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
    if stored.endswith(PACKED):
        weight, stored = unpack_weight(weight, stored), plain_form(stored)
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
