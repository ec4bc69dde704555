"""Routing and routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.catalog.shapes import like_first
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.reference import moe as reference
from deepinfer_kernels.registry import OpSpec, Tolerance


def _gate_args(
    g: torch.Generator, n: int, width: int, experts: int, topk: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    return (
        normal(g, (n, width), dtype),
        normal(g, (experts, width), dtype, width**-0.5),
        normal(g, (experts,), acc_dtype(dtype), 0.1),
        topk,
        1.5,
    )


def _gate_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    experts = size(g, 1, 17)
    args = _gate_args(g, size(g, 0, 9), one_of(g, (8, 65)), experts, size(g, 1, experts), dtype)
    if coin(g, 0.2):
        args[0][:, :] = 0  # all scores tie: the lower experts win
        args[2][:] = 0
    return args


def _gate_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x{width} {topk} of {experts}": _gate_args(seeded(0), n, width, experts, topk, dtype)
        for n, width, experts, topk in ((6, 192, 16, 2), (48, 192, 16, 2), (512, 5120, 384, 6))
    }


def _gate_cost(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[int, int]:
    return (x.numel() + weight.numel()) * x.itemsize, 2 * x.numel() * weight.shape[0]


def _experts_args(
    g: torch.Generator,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    n, width, inner, experts, topk = shape
    return (
        normal(g, (n, width), dtype),
        torch.randint(0, experts, (n, topk), generator=g),
        torch.rand(n, topk, generator=g, dtype=torch.float64).to(acc_dtype(dtype)),
        normal(g, (experts, inner, width), dtype, width**-0.5),
        normal(g, (experts, inner, width), dtype, width**-0.5),
        normal(g, (experts, width, inner), dtype, inner**-0.5),
        10.0,
    )


def _experts_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = (one_of(g, (0, 1, 3, 40, 120)), one_of(g, (8, 33)), one_of(g, (8, 17)), size(g, 1, 7))
    return _experts_args(g, (*shape, size(g, 1, 3)), dtype)


def _experts_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        "{}x{}x{} {} of {}".format(*shape[:3], shape[4], shape[3]): _experts_args(
            seeded(0), shape, dtype
        )
        for shape in ((6, 192, 64, 16, 2), (48, 192, 64, 16, 2), (512, 512, 256, 32, 6))
    }


def _experts_cost(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> tuple[int, int]:
    touched = int(idx.unique().numel())
    each = 3 * w1.shape[1] * w1.shape[2]
    return touched * each * w1.itemsize + 2 * x.numel() * x.itemsize, 2 * idx.numel() * each


def _gate_fake(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    n = x.shape[0]
    return x.new_empty((n, topk), dtype=torch.int64), x.new_empty(
        (n, topk), dtype=acc_dtype(x.dtype)
    )


SPECS = (
    OpSpec(
        name="moe_gate",
        schema=(
            "(Tensor x, Tensor weight, Tensor bias, int topk, float scaling) -> (Tensor, Tensor)"
        ),
        reference=reference.moe_gate,
        fake=_gate_fake,
        tags=frozenset({"compute", "latency"}),
        tolerance=Tolerance(float32=(1e-6, 1e-5), bfloat16=(1e-6, 1e-5), float64=(1e-14, 1e-13)),
        cost=_gate_cost,
        cases=_gate_case,
        shapes=_gate_shapes,
        twin=False,
    ),
    OpSpec(
        name="moe_experts",
        schema=(
            "(Tensor x, Tensor idx, Tensor w, Tensor w1, Tensor w3, Tensor w2, float limit) "
            "-> Tensor"
        ),
        reference=reference.moe_experts,
        fake=like_first,
        tags=frozenset({"compute", "memory"}),
        # bfloat16 rounds gate, up, the product and each expert's output before the last sum.
        tolerance=Tolerance(float32=(1e-5, 1e-5), bfloat16=(3e-2, 2e-2), float64=(1e-13, 1e-13)),
        cost=_experts_cost,
        cases=_experts_case,
        shapes=_experts_shapes,
    ),
)
