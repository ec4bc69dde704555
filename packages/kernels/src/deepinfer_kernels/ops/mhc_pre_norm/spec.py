"""What `mhc_pre_norm` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import matrix, near_one, normal, one_of, seeded
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mhc_pre_norm.reference import mhc_pre_norm as reference_mhc_pre_norm
from deepinfer_kernels.registry import Tolerance


def mhc_pre_norm(
    S: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_pre`, and what its sub-layer reads: ``rms_norm(mhc_collapse(S, pending), norm)``.

    S: [n, h, H]; pending: [n, h], the mix of the sub-layer before; norm: [H]; the others as for
    `mhc_pre`, whose rms_eps is eps. Returns (x [n, H] like S, pre, post, comb).
    """
    op = "mhc_pre_norm"
    floating(op, S=S, pending=pending, fn=fn, base=base, scale=scale, norm=norm)
    shape(op, "S", S, (None, None, None))
    n, h, H = S.shape
    shape(op, "pending", pending, (n, h))
    shape(op, "fn", fn, (h * (h + 2), h * H))
    shape(op, "base", base, (h * (h + 2),))
    shape(op, "scale", scale, (3,))
    shape(op, "norm", norm, (H,))
    require(iters >= 1, op, f"iters is at least 1, got {iters}")
    return dispatch(op, S, pending, fn, base, scale, norm, eps, hc_eps, iters)


def _pre_norm_args(
    g: torch.Generator, n: int, h: int, width: int, iters: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    acc, rows = acc_dtype(dtype), h * (h + 2)
    return (
        normal(g, (n, h, width), dtype),
        normal(g, (n, h), acc),
        matrix(g, (rows, h * width), acc),
        normal(g, (rows,), acc, 0.5),
        normal(g, (3,), acc),
        near_one(g, width, dtype),
        1e-6,
        1e-6,
        iters,
    )


def _pre_norm_fake(S: Tensor, pending: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    acc = acc_dtype(S.dtype)
    return (
        S.new_empty((n, width)),
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h, h), dtype=acc),
    )


def _pre_norm_cost(S: Tensor, pending: Tensor, fn: Tensor, *rest: Any) -> tuple[int, int]:
    n, _, width = S.shape
    moved = (S.numel() + n * width) * S.itemsize + fn.numel() * fn.itemsize
    return moved, 2 * S.numel() * (fn.shape[0] + 2)


SPEC = describe(
    mhc_pre_norm,
    reference=reference_mhc_pre_norm,
    fake=_pre_norm_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(float32=(1e-5, 2e-5), bfloat16=(2e-3, 2**-6), float64=(1e-13, 1e-13)),
    cost=_pre_norm_cost,
    cases=lambda g, dtype: _pre_norm_args(
        g,
        one_of(g, (0, 1, 7, 40)),
        one_of(g, (1, 2, 4)),
        one_of(g, (8, 16, 37)),
        one_of(g, (1, 2, 20)),
        dtype,
    ),
    shapes=lambda dtype: {
        f"{n}x4x192": _pre_norm_args(seeded(0), n, 4, 192, 20, dtype) for n in (1, 6, 48)
    },
)
