"""What every native form does around its call: pointers, dtypes, the way back to torch forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.native.library import load, unavailable

LIBRARY: Any = load() if unavailable() is None else None
CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}


def dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous and of that dtype."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()


def torch_form(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the call needs the torch form: a gradient, or activations of mixed dtypes."""
    for tensor in tensors:
        if tensor.dtype is not dtype:
            return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def check(status: int, op: str, what: str) -> None:
    if status:
        raise IndexError(f"{op}: {what}")
