"""Fake forms many operators share: shapes and dtypes from those of the arguments alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def like_first(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """One output shaped like the first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def like_second(first: Tensor, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """One output shaped like the second argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
