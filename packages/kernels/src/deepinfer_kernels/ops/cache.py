"""Cache pages and the pooling that makes compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.checks import FLOATING, floating, integer, require, shape
from deepinfer_kernels.formats.records import record_bytes, record_format
from deepinfer_kernels.ops._dispatch import kernel


def compress_pool(value: Tensor, gate: Tensor) -> Tensor:
    """Per channel, softmax of the gates over the r tokens of a group weighs their values.

    value, gate: [m, r, D]. Returns [m, D] in the accumulation dtype.
    """
    op = "compress_pool"
    floating(op, value=value, gate=gate)
    shape(op, "value", value, (None, None, None))
    shape(op, "gate", gate, value.shape)
    require(value.shape[1] >= 1, op, "a group holds at least one token")
    return kernel(op, value.device)(value, gate)


def fake_quant(x: Tensor, record: str) -> Tensor:
    """What a cache record makes of x: quantised and dequantised, ``unpack(pack(x))`` bit for bit.

    x: [..., D], D a multiple of the record's block. Returns a new [..., D] like x.
    """
    floating("fake_quant", x=x)
    record_format(record).check_dim(x.shape[-1] if x.dim() else 0)
    return kernel("fake_quant", x.device)(x, record)


def check_pages(
    op: str, cache: Tensor, record: str, dim: int, dtype: torch.dtype, entries: int | None
) -> None:
    """The cache is a byte view whose pages hold ``entries`` such records."""
    width = record_bytes(record, dim, dtype)
    require(cache.dtype is torch.uint8, op, f"cache is uint8, got {cache.dtype}")
    shape(op, "cache", cache, (None, None))
    require(cache.stride(1) == 1 or cache.shape[1] <= 1, op, "bytes of a cache page are contiguous")
    if entries is not None:
        require(
            0 <= entries * width <= cache.shape[1],
            op,
            f"{entries} records of {width} bytes do not fit a page section of "
            f"{cache.shape[1]} bytes",
        )


def kv_store(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    """Quantise rows and write them to their slots, in place; every other byte stays.

    x: [n, D]; cache: uint8 [P, section_bytes], any page stride; slot: int64 [n], distinct,
    -1 skips the row; record: see `deepinfer_kernels.formats`; entries: records a page holds, by
    default as many as fit. Slot s is entry ``s % entries`` of page ``s // entries``; a slot past
    the cache raises IndexError.
    """
    op = "kv_store"
    floating(op, x=x)
    integer(op, slot=slot)
    shape(op, "x", x, (None, None))
    shape(op, "slot", slot, (x.shape[0],))
    check_pages(op, cache, record, x.shape[1], x.dtype, entries)
    kernel(op, cache.device)(x, cache, slot, record, entries)


def kv_load(
    cache: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    """Read slots and dequantise them; the inverse of `kv_store`.

    cache: uint8 [P, section_bytes]; slot: int64 [...], -1 gives zeros; dim: channels of a record.
    Returns [..., dim] in ``dtype``.
    """
    op = "kv_load"
    integer(op, slot=slot)
    require(dtype in FLOATING, op, f"dtype is float32, bfloat16 or float64, got {dtype}")
    check_pages(op, cache, record, dim, dtype, entries)
    return kernel(op, cache.device)(cache, slot, record, dim, dtype, entries)
