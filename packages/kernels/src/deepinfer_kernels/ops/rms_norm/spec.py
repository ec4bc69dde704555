"""What `rms_norm` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import ROUNDED_ONCE, describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.rms_norm.reference import rms_norm as reference_rms_norm


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight``, computed wide and rounded once.

    x: [..., N]; weight: [N], a plain multiplier, or None. Returns [..., N] like x.
    """
    floating("rms_norm", x=x)
    require(x.dim() >= 1, "rms_norm", "x is [..., N], got a scalar")
    if weight is not None:
        floating("rms_norm", weight=weight)
        shape("rms_norm", "weight", weight, (x.shape[-1],))
    return dispatch("rms_norm", x, weight, eps)


def _rms_norm_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    n, width = size(g, 0, 9), one_of(g, (1, 31, 64, 192, 257))
    x = normal(g, (n, width), dtype, sigma=one_of(g, (1, 1000)))
    if n and coin(g, 0.2):
        x[0] = 0  # an all-zero row stays zero, however small eps is
    weight = normal(g, (width,), dtype) if coin(g, 0.8) else None
    return x, weight, 1e-20 if coin(g) else 1e-6


def _rms_norm_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{n}x{width}": (normal(g, (n, width), dtype), normal(g, (width,), dtype), 1e-20)
        for n, width in ((6, 192), (48, 192), (1024, 5120))
    }


def _rms_norm_cost(x: Tensor, weight: Tensor | None, eps: float) -> tuple[int, int]:
    return 2 * x.numel() * x.itemsize, 4 * x.numel()


SPEC = describe(
    rms_norm,
    reference=reference_rms_norm,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    tolerance=ROUNDED_ONCE,
    cost=_rms_norm_cost,
    cases=_rms_norm_case,
    shapes=_rms_norm_shapes,
)
