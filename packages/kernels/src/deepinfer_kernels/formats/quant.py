"""Quantise to a record and back.

With ``a`` the largest magnitude of a block, in float32:

* fp8:        ``s = 2^ceil(log2(max(a, 1e-4) / 448))``,    payload ``E4M3(x / s)``
* index_fp4:  ``s = 2^ceil(log2(max(a, 6 * 2^-126) / 6))``, payload ``E2M1(x / s)``
* fp4:        ``s = E4M3(min(max(a, 6 * 2^-9) / 6, 448))``,  payload ``E2M1(x / s)``

Values are rounded to float32 first, whatever their dtype. ``x / s`` is a division: for fp4, whose
scale is no power of two, multiplying by the reciprocal lands some values on the other side of a
midpoint. A block holding NaN decodes to NaN throughout; one holding inf does so where the scale is
a power of two and saturates in fp4. Every decoded value is representable in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.errors import RecordError
from deepinfer_kernels.formats.codes import (
    E2M1_MAX,
    E4M3_MAX,
    e2m1_byte_values,
    e2m1_values,
    e4m3_values,
    encode_e2m1,
    encode_e4m3,
    encode_pow2_ceil,
    ue8m0_values,
)
from deepinfer_kernels.formats.records import RecordFormat, record_bytes, record_format

__all__ = ["fake_quant", "pack", "unpack"]

FP8_AMAX_FLOOR = 1e-4
INDEX_FP4_AMAX_FLOOR = 6 * 2.0**-126
FP4_AMAX_FLOOR = 6 * 2.0**-9


def _scale_codes(blocks: Tensor, fmt: RecordFormat) -> Tensor:
    """uint8 [..., blocks] scale bytes of float32 [..., blocks, block]."""
    amax = blocks.abs().amax(dim=-1)
    if fmt.name == "fp8":
        return encode_pow2_ceil(amax.clamp(min=FP8_AMAX_FLOOR) / E4M3_MAX)
    if fmt.name == "index_fp4":
        return encode_pow2_ceil(amax.clamp(min=INDEX_FP4_AMAX_FLOOR) / E2M1_MAX)
    return encode_e4m3(amax.clamp(min=FP4_AMAX_FLOOR) / E2M1_MAX)


def _scale_values(codes: Tensor, fmt: RecordFormat) -> Tensor:
    table = ue8m0_values(codes.device) if fmt.scale == "ue8m0" else e4m3_values(codes.device)
    return table[codes.int()]


def _normalised(x: Tensor, fmt: RecordFormat) -> tuple[Tensor, Tensor]:
    """(float32 [..., blocks, block] x / s, uint8 [..., blocks] codes of s)."""
    fmt.check_dim(x.shape[-1])
    blocks = x.to(torch.float32).unflatten(-1, (-1, fmt.block))
    codes = _scale_codes(blocks, fmt)
    return blocks / _scale_values(codes, fmt).unsqueeze(-1), codes


def _floating(x: Tensor) -> None:
    if not x.is_floating_point():
        raise RecordError(f"a cache record stores floating point values, got {x.dtype}")


def pack(x: Tensor, record: str) -> Tensor:
    """[..., D] to uint8 [..., record_bytes]: of each vector the payload, then the scales."""
    fmt = record_format(record)
    _floating(x)
    if fmt.name == "raw":
        return x.contiguous().view(torch.uint8)
    normalised, scales = _normalised(x, fmt)
    if fmt.value_bits == 8:
        data = encode_e4m3(normalised).flatten(-2)
    else:
        nibbles = encode_e2m1(normalised).flatten(-2)
        data = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return torch.cat((data, scales), dim=-1)


def unpack(packed: Tensor, record: str, dim: int, dtype: torch.dtype) -> Tensor:
    """uint8 [..., record_bytes] back to [..., dim] in ``dtype``; the inverse of `pack`.

    Raises RecordError for a record format that is unknown or does not fit.
    """
    fmt = record_format(record)
    wanted = record_bytes(record, dim, dtype)
    if packed.dtype is not torch.uint8 or packed.shape[-1] != wanted:
        raise RecordError(
            f"record {record!r} with {dim} channels is uint8 [..., {wanted}], "
            f"got {packed.dtype} [..., {packed.shape[-1]}]"
        )
    if fmt.name == "raw":
        return packed.contiguous().view(dtype)
    data, scales = packed.split([fmt.data_bytes(dim), fmt.scale_bytes(dim)], dim=-1)
    if fmt.value_bits == 8:
        values = e4m3_values(packed.device)[data.int()]
    else:
        values = e2m1_byte_values(packed.device)[data.int()].flatten(-2)
    blocks = values.unflatten(-1, (-1, fmt.block))
    return (blocks * _scale_values(scales, fmt).unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quant(x: Tensor, record: str) -> Tensor:
    """``unpack(pack(x))`` bit for bit, without building the bytes. ``raw`` copies."""
    fmt = record_format(record)
    _floating(x)
    if fmt.name == "raw":
        return x.clone(memory_format=torch.contiguous_format)
    normalised, codes = _normalised(x, fmt)
    if fmt.value_bits == 8:
        values = normalised.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    else:
        values = e2m1_values(x.device)[encode_e2m1(normalised).int()]
    return (values * _scale_values(codes, fmt).unsqueeze(-1)).flatten(-2).to(x.dtype)
