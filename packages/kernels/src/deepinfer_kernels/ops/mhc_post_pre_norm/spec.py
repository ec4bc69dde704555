"""What `mhc_post_pre_norm` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import matrix, near_one, normal, one_of, seeded
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mhc_post_pre_norm.reference import (
    mhc_post_pre_norm as reference_mhc_post_pre_norm,
)
from deepinfer_kernels.registry import Tolerance


def mhc_post_pre_norm(
    y: Tensor,
    S: Tensor,
    post: Tensor,
    comb: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The end of one sub-layer and the beginning of the next: `mhc_post`, then `mhc_pre_norm`.

    y: [n, H], what the sub-layer gave; S: [n, h, H], post: [n, h] and comb: [n, h, h] as for
    `mhc_post`; the others as for `mhc_pre_norm` of the next sub-layer. Returns (the new streams
    like S, x [n, H], pre, post, comb), to the bit what the two give one after the other.
    """
    op = "mhc_post_pre_norm"
    floating(op, y=y, S=S, post=post, comb=comb)
    floating(op, pending=pending, fn=fn, base=base, scale=scale, norm=norm)
    shape(op, "S", S, (None, None, None))
    n, h, H = S.shape
    shape(op, "y", y, (n, H))
    shape(op, "post", post, (n, h))
    shape(op, "comb", comb, (n, h, h))
    shape(op, "pending", pending, (n, h))
    shape(op, "fn", fn, (h * (h + 2), h * H))
    shape(op, "base", base, (h * (h + 2),))
    shape(op, "scale", scale, (3,))
    shape(op, "norm", norm, (H,))
    require(iters >= 1, op, f"iters is at least 1, got {iters}")
    return dispatch(op, y, S, post, comb, pending, fn, base, scale, norm, eps, hc_eps, iters)


def _args(
    g: torch.Generator, n: int, h: int, width: int, iters: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    acc, rows = acc_dtype(dtype), h * (h + 2)
    return (
        normal(g, (n, width), dtype),
        normal(g, (n, h, width), dtype),
        normal(g, (n, h), acc),
        torch.softmax(normal(g, (n, h, h), acc), dim=-1),
        normal(g, (n, h), acc),
        matrix(g, (rows, h * width), acc),
        normal(g, (rows,), acc, 0.5),
        normal(g, (3,), acc),
        near_one(g, width, dtype),
        1e-6,
        1e-6,
        iters,
    )


def _fake(y: Tensor, S: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    acc = acc_dtype(S.dtype)
    return (
        S.new_empty(S.shape),
        S.new_empty((n, width)),
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h, h), dtype=acc),
    )


def _cost(
    y: Tensor, S: Tensor, post: Tensor, comb: Tensor, pending: Tensor, fn: Tensor, *rest: Any
) -> tuple[int, int]:
    moved = (2 * S.numel() + 2 * y.numel()) * S.itemsize + fn.numel() * fn.itemsize
    return moved, 2 * S.numel() * (fn.shape[0] + S.shape[1] + 3)


SPEC = describe(
    mhc_post_pre_norm,
    reference=reference_mhc_post_pre_norm,
    fake=_fake,
    tags=frozenset({"memory", "latency"}),
    # bfloat16 rounds the streams before they are collapsed and normed.
    tolerance=Tolerance(float32=(2e-5, 2e-5), bfloat16=(2e-2, 2**-6), float64=(1e-13, 1e-13)),
    cost=_cost,
    cases=lambda g, dtype: _args(
        g,
        one_of(g, (0, 1, 7, 40)),
        one_of(g, (1, 2, 4)),
        one_of(g, (8, 16, 37)),
        one_of(g, (1, 2, 20)),
        dtype,
    ),
    shapes=lambda dtype: {f"{n}x4x192": _args(seeded(0), n, 4, 192, 20, dtype) for n in (1, 6, 48)},
)
