"""What `norm_rope_quant` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import check_angles, floating, shape
from deepinfer_kernels.draw import angles, near_one, normal, one_of, seeded, size
from deepinfer_kernels.formats.records import record_format
from deepinfer_kernels.ops._describe import ROUNDED_EACH, describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.norm_rope_quant.reference import (
    norm_rope_quant as reference_norm_rope_quant,
)


def norm_rope_quant(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: str
) -> Tensor:
    """``fake_quant(rope(rms_norm(x, weight, eps), cos, sin), record)``: a cache row.

    x: [n, D]; weight: [D]; cos, sin: [n, R/2]. Returns [n, D] like x.
    """
    op = "norm_rope_quant"
    floating(op, x=x, weight=weight, cos=cos, sin=sin)
    shape(op, "x", x, (None, None))
    n, dim = x.shape
    shape(op, "weight", weight, (dim,))
    check_angles(op, cos, sin, n, dim)
    record_format(record).check_dim(dim)
    return dispatch(op, x, weight, eps, cos, sin, record)


def _row_args(
    g: torch.Generator, n: int, dim: int, record: str, dtype: torch.dtype
) -> tuple[Any, ...]:
    return (
        normal(g, (n, dim), dtype),
        near_one(g, dim, dtype),
        1e-6,
        *angles(g, n, dim // 4, dtype),
        record,
    )


def _row_cost(x: Tensor, *rest: Any) -> tuple[int, int]:
    return 2 * x.numel() * x.itemsize, 12 * x.numel()


SPEC = describe(
    norm_rope_quant,
    reference=reference_norm_rope_quant,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    tolerance=ROUNDED_EACH,
    cost=_row_cost,
    cases=lambda g, dtype: _row_args(g, size(g, 0, 9), one_of(g, (32, 96)), "raw", dtype),
    shapes=lambda dtype: {
        f"fp8 {n}x64": _row_args(seeded(0), n, 64, "fp8", dtype) for n in (1, 6, 48)
    },
)
