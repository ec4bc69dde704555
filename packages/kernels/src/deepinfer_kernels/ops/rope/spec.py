"""What `rope` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import angles, coin, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import ROUNDED_ONCE, describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.rope.reference import rope as reference_rope


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last R channels of each row, adjacent pairs (2i, 2i+1) as complex numbers.

    x: [n, ..., D]; cos, sin: [n, R/2] in the accumulation dtype, one angle a row and pair.
    ``inverse`` turns back. Returns [n, ..., D] like x; channels before the last R are copied.
    """
    floating("rope", x=x, cos=cos, sin=sin)
    require(x.dim() >= 2, "rope", f"x is [n, ..., D], got {list(x.shape)}")
    shape("rope", "cos", cos, (x.shape[0], None))
    shape("rope", "sin", sin, cos.shape)
    require(
        2 * cos.shape[1] <= x.shape[-1],
        "rope",
        f"cos turns {2 * cos.shape[1]} channels but x has {x.shape[-1]}",
    )
    return dispatch("rope", x, cos, sin, inverse)


def _rope_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    n, dim = size(g, 0, 7), one_of(g, (16, 64, 65))
    pairs = one_of(g, (1, 3, 8))
    shape = (n, size(g, 1, 5), dim) if coin(g) else (n, dim)
    return normal(g, shape, dtype), *angles(g, n, pairs, dtype), coin(g)


def _rope_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{n}x{heads}x{dim}": (
            normal(g, (n, heads, dim), dtype),
            *angles(g, n, rotary // 2, dtype),
            False,
        )
        for n, heads, dim, rotary in ((6, 6, 64, 16), (48, 6, 64, 16), (256, 64, 512, 64))
    }


def _rope_cost(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[int, int]:
    turned = x.numel() // max(x.shape[-1], 1) * cos.shape[-1]
    return 2 * x.numel() * x.itemsize, 6 * turned


SPEC = describe(
    rope,
    reference=reference_rope,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    tolerance=ROUNDED_ONCE,
    cost=_rope_cost,
    cases=_rope_case,
    shapes=_rope_shapes,
)
