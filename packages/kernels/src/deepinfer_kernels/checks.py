"""Argument checks of the public operators: one clear line saying what was wanted and got."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.formats.records import record_bytes

__all__ = [
    "FLOATING",
    "check_angles",
    "check_head_pages",
    "check_pages",
    "floating",
    "integer",
    "require",
    "shape",
]

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float64})


def require(condition: bool, op: str, message: str) -> None:
    """Raise ShapeError naming the operator unless the condition holds."""
    if not condition:
        raise ShapeError(f"{op}: {message}")


def _is_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ShapeError(f"{op}: {name} is a torch tensor, got {type(value).__name__}")


def floating(op: str, **tensors: Tensor) -> None:
    """Every value is a tensor of float32, bfloat16 or float64."""
    for name, tensor in tensors.items():
        _is_tensor(op, name, tensor)
        if tensor.dtype not in FLOATING:
            raise ShapeError(f"{op}: {name} is float32, bfloat16 or float64, got {tensor.dtype}")


def integer(op: str, **tensors: Tensor) -> None:
    """Every value is a tensor of int64."""
    for name, tensor in tensors.items():
        _is_tensor(op, name, tensor)
        if tensor.dtype is not torch.int64:
            raise ShapeError(f"{op}: {name} is int64, got {tensor.dtype}; convert with .long()")


def shape(op: str, name: str, tensor: Tensor, wanted: Iterable[int | None]) -> None:
    """The tensor has these sizes; None matches any."""
    sizes = tuple(wanted)
    if len(sizes) != tensor.dim() or any(
        want is not None and want != got for want, got in zip(sizes, tensor.shape, strict=True)
    ):
        text = ", ".join("*" if size is None else str(size) for size in sizes)
        raise ShapeError(f"{op}: {name} is [{text}], got {list(tensor.shape)}")


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


def check_angles(op: str, cos: Tensor, sin: Tensor, n: int, dim: int) -> None:
    """cos and sin turn at most ``dim`` channels of n rows."""
    floating(op, cos=cos, sin=sin)
    shape(op, "cos", cos, (n, None))
    shape(op, "sin", sin, cos.shape)
    require(2 * cos.shape[1] <= dim, op, f"cos has at most {dim // 2} columns, got {cos.shape[1]}")


def check_head_pages(op: str, keys: Tensor, values: Tensor, dim: int, dtype: torch.dtype) -> None:
    """keys and values are [P, B, kv_heads, dim] of that dtype, the channels of a head adjacent."""
    for name, pages in (("keys", keys), ("values", values)):
        shape(op, name, pages, (None, None, None, dim))
        require(pages.dtype is dtype, op, f"{name} is {dtype} like the rows, got {pages.dtype}")
        adjacent = pages.stride(3) == 1 or dim <= 1
        require(adjacent, op, f"channels of {name} are adjacent in memory")
    shape(op, "values", values, keys.shape)
    require(keys.shape[2] >= 1, op, "there is at least one key head")
