"""What `swiglu` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import ROUNDED_ONCE, describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.swiglu.reference import swiglu as reference_swiglu


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``, computed wide and rounded once.

    gate, up: the same shape; limit may be inf. Returns that shape like gate.
    """
    floating("swiglu", gate=gate, up=up)
    shape("swiglu", "up", up, gate.shape)
    require(limit > 0, "swiglu", f"limit is positive, got {limit}")
    return dispatch("swiglu", gate, up, limit)


def _swiglu_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = (size(g, 0, 5), size(g, 1, 70))
    limit = one_of(g, (1, 10)) if coin(g, 0.8) else math.inf
    return normal(g, shape, dtype, 8), normal(g, shape, dtype, 8), float(limit)


def _swiglu_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{n}x{width}": (normal(g, (n, width), dtype), normal(g, (n, width), dtype), 10.0)
        for n, width in ((6, 64), (48, 64), (1024, 2304))
    }


def _swiglu_cost(gate: Tensor, up: Tensor, limit: float) -> tuple[int, int]:
    return 3 * gate.numel() * gate.itemsize, 8 * gate.numel()


SPEC = describe(
    swiglu,
    reference=reference_swiglu,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    tolerance=ROUNDED_ONCE,
    cost=_swiglu_cost,
    cases=_swiglu_case,
    shapes=_swiglu_shapes,
)
