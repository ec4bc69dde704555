"""What `add_rms_norm` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import near_one, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.add_rms_norm.reference import add_rms_norm as reference_add_rms_norm
from deepinfer_kernels.registry import Tolerance


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + residual`` rounded to x's dtype, and its `rms_norm`: what stands between two layers.

    x, residual: [..., N] of one dtype; weight: [N]. Returns (norm [..., N], sum [..., N]) like x.
    """
    op = "add_rms_norm"
    floating(op, x=x, residual=residual, weight=weight)
    require(x.dim() >= 1, op, "x is [..., N], got a scalar")
    shape(op, "residual", residual, x.shape)
    require(residual.dtype is x.dtype, op, f"residual is {x.dtype} like x, got {residual.dtype}")
    shape(op, "weight", weight, (x.shape[-1],))
    return dispatch(op, x, residual, weight, eps)


def _args(g: torch.Generator, n: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    drawn = (normal(g, (n, width), dtype), normal(g, (n, width), dtype))
    return *drawn, near_one(g, width, dtype), 1e-6


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x{width}": _args(seeded(0), n, width, dtype)
        for n, width in ((1, 576), (32, 576), (256, 4096), (1024, 4096))
    }


def _cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[int, int]:
    return 4 * x.numel() * x.itemsize, 5 * x.numel()


def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return like_first(x), like_first(x)


SPEC = describe(
    add_rms_norm,
    reference=reference_add_rms_norm,
    fake=_fake,
    tags=frozenset({"memory", "latency"}),
    # In bfloat16 the sum is rounded before its norm; against the wide twin that is one ulp more.
    tolerance=Tolerance(float32=(2e-6, 4e-6), bfloat16=(2**-8, 2**-6), float64=(1e-14, 1e-14)),
    cost=_cost,
    cases=lambda g, dtype: _args(g, size(g, 0, 9), one_of(g, (1, 31, 64, 192, 257)), dtype),
    shapes=_shapes,
)
