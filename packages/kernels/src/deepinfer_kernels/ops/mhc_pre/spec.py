"""What `mhc_pre` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mhc_pre.reference import mhc_pre as reference_mhc_pre
from deepinfer_kernels.registry import Tolerance


def mhc_pre(
    S: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three mixes of one sub-layer, from the normalised flattened streams.

    S: [n, h, H]; fn: [h(h+2), h*H]; base: [h(h+2)]; scale: [3]; iters: Sinkhorn iterations, >= 1.
    Returns, in the accumulation dtype: pre [n, h] = sigmoid + hc_eps, post [n, h] = 2 sigmoid,
    comb [n, h_in, h_out] whose columns (over h_in) sum to 1 up to hc_eps.
    """
    op = "mhc_pre"
    floating(op, S=S, fn=fn, base=base, scale=scale)
    shape(op, "S", S, (None, None, None))
    h, H = S.shape[1], S.shape[2]
    shape(op, "fn", fn, (h * (h + 2), h * H))
    shape(op, "base", base, (h * (h + 2),))
    shape(op, "scale", scale, (3,))
    require(iters >= 1, op, f"iters is at least 1, got {iters}")
    return dispatch(op, S, fn, base, scale, rms_eps, hc_eps, iters)


def _pre_args(
    g: torch.Generator, n: int, h: int, width: int, iters: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    acc, rows = acc_dtype(dtype), h * (h + 2)
    return (
        normal(g, (n, h, width), dtype),
        normal(g, (rows, h * width), acc, (h * width) ** -0.5),
        normal(g, (rows,), acc, 0.5),
        normal(g, (3,), acc),
        1e-20,
        1e-6,
        iters,
    )


def _pre_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    iters = one_of(g, (1, 2, 10, 20))
    return _pre_args(g, size(g, 0, 7), one_of(g, (1, 2, 4)), one_of(g, (1, 16, 37)), iters, dtype)


def _pre_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x4x{width}": _pre_args(seeded(0), n, 4, width, 20, dtype)
        for n, width in ((6, 192), (48, 192), (256, 5120))
    }


def _pre_cost(
    S: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float, iters: int
) -> tuple[int, int]:
    n, h, width = S.shape
    flops = 2 * n * h * width * (fn.shape[0] + 1) + n * iters * 4 * h * h
    return S.numel() * S.itemsize + fn.numel() * fn.itemsize, flops


def _pre_fake(
    S: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rms_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    n, h, _ = S.shape
    acc = acc_dtype(S.dtype)
    return (
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h, h), dtype=acc),
    )


SPEC = describe(
    mhc_pre,
    reference=reference_mhc_pre,
    fake=_pre_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(float32=(2e-6, 2e-5), bfloat16=(2e-6, 2e-5), float64=(1e-14, 1e-13)),
    cost=_pre_cost,
    cases=_pre_case,
    shapes=_pre_shapes,
)
