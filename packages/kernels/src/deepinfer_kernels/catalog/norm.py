"""Normalisation, rotary embedding, gated activation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.catalog.shapes import like_first
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.reference import norm as reference
from deepinfer_kernels.registry import OpSpec, Tolerance

ROUNDED_ONCE = Tolerance(float32=(1e-6, 2e-6), bfloat16=(1e-6, 2**-7), float64=(1e-14, 1e-14))
"""Wide arithmetic and one rounding at the end: in bfloat16 two such results are one ulp apart."""


def _rms_norm_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    n, width = size(g, 0, 9), one_of(g, (1, 31, 64, 192, 257))
    x = normal(g, (n, width), dtype, sigma=one_of(g, (1, 1000)))
    if n and coin(g, 0.2):
        x[0] = 0  # an all-zero row stays zero, however small eps is
    weight = normal(g, (width,), dtype) if coin(g, 0.8) else None
    return x, weight, 1e-20 if coin(g) else 1e-6


def _rms_norm_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{n}x{width}": (normal(g, (n, width), dtype), normal(g, (width,), dtype), 1e-20)
        for n, width in ((6, 192), (48, 192), (1024, 5120))
    }


def _rms_norm_cost(x: Tensor, weight: Tensor | None, eps: float) -> tuple[int, int]:
    return 2 * x.numel() * x.itemsize, 4 * x.numel()


def _angles(g: torch.Generator, n: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.rand(n, pairs, generator=g, dtype=torch.float64) * 2 * math.pi
    acc = acc_dtype(dtype)
    return angle.cos().to(acc), angle.sin().to(acc)


def _rope_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    n, dim = size(g, 0, 7), one_of(g, (16, 64, 65))
    pairs = one_of(g, (1, 3, 8))
    shape = (n, size(g, 1, 5), dim) if coin(g) else (n, dim)
    return normal(g, shape, dtype), *_angles(g, n, pairs, dtype), coin(g)


def _rope_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{n}x{heads}x{dim}": (
            normal(g, (n, heads, dim), dtype),
            *_angles(g, n, rotary // 2, dtype),
            False,
        )
        for n, heads, dim, rotary in ((6, 6, 64, 16), (48, 6, 64, 16), (256, 64, 512, 64))
    }


def _rope_cost(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[int, int]:
    turned = x.numel() // max(x.shape[-1], 1) * cos.shape[-1]
    return 2 * x.numel() * x.itemsize, 6 * turned


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


SPECS = (
    OpSpec(
        name="rms_norm",
        schema="(Tensor x, Tensor? weight, float eps) -> Tensor",
        reference=reference.rms_norm,
        fake=like_first,
        tags=frozenset({"memory", "latency"}),
        tolerance=ROUNDED_ONCE,
        cost=_rms_norm_cost,
        cases=_rms_norm_case,
        shapes=_rms_norm_shapes,
    ),
    OpSpec(
        name="rope",
        schema="(Tensor x, Tensor cos, Tensor sin, bool inverse=False) -> Tensor",
        reference=reference.rope,
        fake=like_first,
        tags=frozenset({"memory", "latency"}),
        tolerance=ROUNDED_ONCE,
        cost=_rope_cost,
        cases=_rope_case,
        shapes=_rope_shapes,
    ),
    OpSpec(
        name="swiglu",
        schema="(Tensor gate, Tensor up, float limit) -> Tensor",
        reference=reference.swiglu,
        fake=like_first,
        tags=frozenset({"memory", "latency"}),
        tolerance=ROUNDED_ONCE,
        cost=_swiglu_cost,
        cases=_swiglu_case,
        shapes=_swiglu_shapes,
    ),
)
