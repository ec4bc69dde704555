"""What `rope_half` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import angles, coin, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import ROUNDED_ONCE, describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.rope_half.reference import rope_half as reference_rope_half


def rope_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of each row, channel i with channel i + R/2 ("rotate_half").

    x: [n, ..., D]; cos, sin: [n, R/2] in the accumulation dtype, one angle a row and pair.
    Returns [n, ..., D] like x; channels from R on are copied. `rope` turns adjacent pairs.
    """
    op = "rope_half"
    floating(op, x=x, cos=cos, sin=sin)
    require(x.dim() >= 2, op, f"x is [n, ..., D], got {list(x.shape)}")
    shape(op, "cos", cos, (x.shape[0], None))
    shape(op, "sin", sin, cos.shape)
    turned = 2 * cos.shape[1]
    require(turned <= x.shape[-1], op, f"cos turns {turned} channels but x has {x.shape[-1]}")
    return dispatch(op, x, cos, sin)


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    n, dim, pairs = size(g, 0, 7), one_of(g, (16, 64, 65)), one_of(g, (1, 3, 8))
    form = (n, size(g, 1, 5), dim) if coin(g) else (n, dim)
    return normal(g, form, dtype), *angles(g, n, pairs, dtype)


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{n}x{heads}x{dim}": (normal(g, (n, heads, dim), dtype), *angles(g, n, dim // 2, dtype))
        for n, heads, dim in ((1, 9, 64), (32, 9, 64), (256, 32, 128))
    }


def _cost(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int]:
    turned = x.numel() // max(x.shape[-1], 1) * cos.shape[-1]
    return 2 * x.numel() * x.itemsize, 6 * turned


SPEC = describe(
    rope_half,
    reference=reference_rope_half,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    tolerance=ROUNDED_ONCE,
    cost=_cost,
    cases=_case,
    shapes=_shapes,
)
