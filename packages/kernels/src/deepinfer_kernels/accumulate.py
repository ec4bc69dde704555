"""The accumulation dtype: what the model text calls fp32."""

from __future__ import annotations

import torch

__all__ = ["acc_dtype"]


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every narrower activation dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32
