"""Argument checks of the public operators: one clear line saying what was wanted and got."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deepinfer_kernels.errors import ShapeError

__all__ = ["FLOATING", "floating", "integer", "require", "shape"]

FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float64})


def require(condition: bool, op: str, message: str) -> None:
    """Raise ShapeError naming the operator unless the condition holds."""
    if not condition:
        raise ShapeError(f"{op}: {message}")


def floating(op: str, **tensors: Tensor) -> None:
    """Every tensor is float32, bfloat16 or float64."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATING:
            raise ShapeError(f"{op}: {name} is float32, bfloat16 or float64, got {tensor.dtype}")


def integer(op: str, **tensors: Tensor) -> None:
    """Every tensor is int64."""
    for name, tensor in tensors.items():
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
