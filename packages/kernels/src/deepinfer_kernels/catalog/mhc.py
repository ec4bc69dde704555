"""Hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.catalog.shapes import like_second
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.reference import mhc as reference
from deepinfer_kernels.registry import OpSpec, Tolerance


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


def _collapse_args(
    g: torch.Generator, n: int, h: int, width: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    return normal(g, (n, h, width), dtype), normal(g, (n, h), acc_dtype(dtype))


def _collapse_fake(S: Tensor, pre: Tensor) -> Tensor:
    return S.new_empty((S.shape[0], S.shape[2]))


def _post_args(
    g: torch.Generator, n: int, h: int, width: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    acc = acc_dtype(dtype)
    mixes = torch.softmax(normal(g, (n, h, h), acc), dim=-1)
    return (
        normal(g, (n, width), dtype),
        normal(g, (n, h, width), dtype),
        normal(g, (n, h), acc),
        mixes,
    )


def _sizes(g: torch.Generator) -> tuple[int, int, int]:
    return size(g, 0, 7), one_of(g, (1, 2, 4)), one_of(g, (1, 16, 37))


def _labelled(args: Any, dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x4x{width}": args(seeded(0), n, 4, width, dtype)
        for n, width in ((6, 192), (48, 192), (256, 5120))
    }


def _collapse_cost(S: Tensor, pre: Tensor) -> tuple[int, int]:
    return (S.numel() + S.numel() // max(S.shape[1], 1)) * S.itemsize, 2 * S.numel()


def _post_cost(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> tuple[int, int]:
    return (y.numel() + 2 * S.numel()) * S.itemsize, 2 * S.numel() * (S.shape[1] + 1)


SPECS = (
    OpSpec(
        name="mhc_pre",
        schema=(
            "(Tensor S, Tensor fn, Tensor base, Tensor scale, float rms_eps, float hc_eps, "
            "int iters) -> (Tensor, Tensor, Tensor)"
        ),
        reference=reference.mhc_pre,
        fake=_pre_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(float32=(2e-6, 2e-5), bfloat16=(2e-6, 2e-5), float64=(1e-14, 1e-13)),
        cost=_pre_cost,
        cases=_pre_case,
        shapes=_pre_shapes,
    ),
    OpSpec(
        name="mhc_collapse",
        schema="(Tensor S, Tensor pre) -> Tensor",
        reference=reference.mhc_collapse,
        fake=_collapse_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(float32=(2e-6, 2e-6), bfloat16=(2e-6, 2**-7), float64=(1e-14, 1e-14)),
        cost=_collapse_cost,
        cases=lambda g, dtype: _collapse_args(g, *_sizes(g), dtype),
        shapes=lambda dtype: _labelled(_collapse_args, dtype),
    ),
    OpSpec(
        name="mhc_post",
        schema="(Tensor y, Tensor S, Tensor post, Tensor comb) -> Tensor",
        reference=reference.mhc_post,
        fake=like_second,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(float32=(4e-6, 4e-6), bfloat16=(4e-6, 2**-7), float64=(1e-14, 1e-14)),
        cost=_post_cost,
        cases=lambda g, dtype: _post_args(g, *_sizes(g), dtype),
        shapes=lambda dtype: _labelled(_post_args, dtype),
    ),
)
