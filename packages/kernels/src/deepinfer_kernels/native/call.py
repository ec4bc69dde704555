"""What every native form does around its call: which tensors it takes, pointers, numbers of dtypes.

A form runs in microseconds, so each does the least it can; shapes are checked by the functions of
`deepinfer_kernels.ops`. `torch_form` says whether a call belongs to the torch form instead, and
refuses tensors whose memory cannot be read through a pointer.

Each C++ form sums a row in an order of its own, whatever the other rows are. Torch's products do
not: so where `only_native` is set, no form leaves a call to torch, however many rows it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.native.library import load, unavailable

__all__ = [
    "CODE",
    "LIBRARY",
    "as_dtype",
    "check",
    "dense",
    "few_rows",
    "left_to_torch",
    "many_rows",
    "only_native",
    "plain",
    "torch_form",
]

LIBRARY: Any = load() if unavailable() is None else None
CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}

_PLAIN = {Tensor, Parameter}
_FEW_ROWS = {torch.float32: 24, torch.bfloat16: 24, torch.float64: 48}
"""Most rows of a fused product, by dtype."""


class _Mode(threading.local):
    only_native = False


_mode = _Mode()


def only_native(form: Callable[..., Any]) -> Callable[..., Any]:
    """The form, which raises ShapeError where it would leave a call to torch."""

    @wraps(form)
    def call(*args: Any, **named: Any) -> Any:
        _mode.only_native = True
        try:
            return form(*args, **named)
        finally:
            _mode.only_native = False

    return call


def dense(x: Tensor) -> Tensor:
    """The values of x in order in memory."""
    if x.is_neg():  # a view that only says its values are negated
        x = x.resolve_neg()
    return x if x.is_contiguous() else x.contiguous()


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dense`, and of that dtype."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return dense(x)


def plain(*tensors: Tensor | None) -> None:
    """Raise ShapeError unless every tensor lies in memory that this process can read."""
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
            raise ShapeError(
                f"a native form reads plain dense CPU tensors, got a {type(tensor).__name__} on "
                f"{tensor.device} ({tensor.layout}); call the function of deepinfer_kernels.ops, "
                "which picks the form that fits"
            )


def torch_form(dtype: torch.dtype, activations: tuple[Tensor, ...], *others: Tensor | None) -> bool:
    """Whether the call needs the torch form: activations of mixed dtypes, or any gradient."""
    plain(*activations, *others)
    for tensor in activations:
        if tensor.dtype is not dtype:
            return left_to_torch(
                f"one dtype of activations and weights, got {dtype}, {tensor.dtype}"
            )
    if torch.is_grad_enabled():
        for tensor in (*activations, *others):
            if tensor is not None and tensor.requires_grad:
                return left_to_torch("no gradient")
    return False


def left_to_torch(wanted: str) -> bool:
    """True; ShapeError, saying what was wanted, where no call may be left to torch."""
    if _mode.only_native:
        raise ShapeError(f"batch-invariant forms want {wanted}")
    return True


def few_rows(x: Tensor, weights: tuple[Tensor, ...], *others: Tensor) -> bool:
    """Whether a fused form takes the call: few rows, and not `torch_form`."""
    native = not torch_form(x.dtype, (x, *weights), *others)
    return native and not many_rows(x.shape[0], _FEW_ROWS[x.dtype] + 1)


def many_rows(rows: int, least: int) -> bool:
    """Whether there are so many rows that torch's products are faster, and may be taken."""
    return rows >= least and not _mode.only_native


def check(status: int, op: str, what: str) -> None:
    """Raise IndexError where the library found an index outside its table."""
    if status:
        raise IndexError(f"{op}: {what}")
