"""The residual added, and the norm of the sum."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.ops.rms_norm.reference import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total
