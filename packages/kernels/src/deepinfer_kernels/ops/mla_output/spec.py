"""What `mla_output` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import check_angles, floating, require, shape
from deepinfer_kernels.draw import angles, matrix, normal, one_of, seeded
from deepinfer_kernels.ops._describe import ROUNDED_EACH, describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mla_output.reference import mla_output as reference_mla_output


def mla_output(out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    """Inverse rotation, then the grouped low-rank output projection.

    out: [n, heads, D]; cos, sin: [n, R/2]; wo_a: [groups, r, heads / groups * D];
    wo_b: [H, groups * r]. Returns [n, H] like out.
    """
    op = "mla_output"
    floating(op, out=out, cos=cos, sin=sin, wo_a=wo_a, wo_b=wo_b)
    shape(op, "out", out, (None, None, None))
    n, heads, dim = out.shape
    shape(op, "wo_a", wo_a, (None, None, None))
    groups, rank, _ = wo_a.shape
    require(
        groups > 0 and heads % groups == 0,
        op,
        f"the groups of wo_a divide the {heads} heads, got {groups}",
    )
    shape(op, "wo_a", wo_a, (groups, rank, heads // groups * dim))
    shape(op, "wo_b", wo_b, (None, groups * rank))
    check_angles(op, cos, sin, n, dim)
    return dispatch(op, out, cos, sin, wo_a, wo_b)


def _output_args(
    g: torch.Generator, n: int, widths: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[Any, ...]:
    heads, dim, groups, rank, width = widths
    return (
        normal(g, (n, heads, dim), dtype),
        *angles(g, n, dim // 4, dtype),
        matrix(g, (groups, rank, heads // groups * dim), dtype),
        matrix(g, (width, groups * rank), dtype),
    )


def _output_fake(out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    return out.new_empty((out.shape[0], wo_b.shape[0]))


def _output_cost(
    out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor
) -> tuple[int, int]:
    weights = wo_a.numel() + wo_b.numel()
    moved = out.numel() + weights + out.shape[0] * wo_b.shape[0]
    return moved * out.itemsize, 2 * out.shape[0] * weights


SPEC = describe(
    mla_output,
    reference=reference_mla_output,
    fake=_output_fake,
    tags=frozenset({"compute", "latency"}),
    tolerance=ROUNDED_EACH,
    cost=_output_cost,
    cases=lambda g, dtype: _output_args(
        g,
        one_of(g, (0, 1, 5, 60)),
        (4, one_of(g, (32, 36)), one_of(g, (1, 2, 4)), one_of(g, (3, 16)), one_of(g, (8, 37))),
        dtype,
    ),
    shapes=lambda dtype: {
        f"{n}x6x64 to 192": _output_args(seeded(0), n, (6, 64, 2, 48, 192), dtype)
        for n in (1, 6, 48)
    },
)
