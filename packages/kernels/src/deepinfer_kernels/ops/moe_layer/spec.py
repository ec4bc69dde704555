"""What `moe_layer` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import matrix, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.moe_layer.reference import moe_layer as reference_moe_layer
from deepinfer_kernels.registry import Tolerance


def moe_layer(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    topk: int,
    scaling: float,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared_w1: Tensor,
    shared_w3: Tensor,
    shared_w2: Tensor,
    limit: float,
) -> Tensor:
    """`moe_gate`, `moe_experts` and the shared expert, whose output is added with weight 1.

    x: [n, H]; gate: [E, H]; bias: [E], or [n, E] where rows differ; w1, w3: [E, I, H];
    w2: [E, H, I]; shared_w1, shared_w3: [J, H]; shared_w2: [H, J]. Returns [n, H] like x.
    """
    op = "moe_layer"
    floating(op, x=x, gate=gate, bias=bias, w1=w1, w3=w3, w2=w2)
    floating(op, shared_w1=shared_w1, shared_w3=shared_w3, shared_w2=shared_w2)
    shape(op, "x", x, (None, None))
    n, H = x.shape
    shape(op, "w1", w1, (None, None, H))
    experts, inner, _ = w1.shape
    shape(op, "w3", w3, w1.shape)
    shape(op, "w2", w2, (experts, H, inner))
    shape(op, "gate", gate, (experts, H))
    shape(op, "bias", bias, (experts,) if bias.dim() == 1 else (n, experts))
    shape(op, "shared_w1", shared_w1, (None, H))
    shape(op, "shared_w3", shared_w3, shared_w1.shape)
    shape(op, "shared_w2", shared_w2, (H, shared_w1.shape[0]))
    require(1 <= topk <= experts, op, f"topk is 1..{experts}, got {topk}")
    return dispatch(
        op, x, gate, bias, topk, scaling, w1, w3, w2, shared_w1, shared_w3, shared_w2, limit
    )


def _moe_args(
    g: torch.Generator, n: int, widths: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[Any, ...]:
    width, inner, shared, experts, topk = widths
    acc = acc_dtype(dtype)
    return (
        normal(g, (n, width), dtype),
        matrix(g, (experts, width), acc),
        normal(g, (experts,), acc),
        topk,
        1.5,
        matrix(g, (experts, inner, width), dtype),
        matrix(g, (experts, inner, width), dtype),
        matrix(g, (experts, width, inner), dtype),
        matrix(g, (shared, width), dtype),
        matrix(g, (shared, width), dtype),
        matrix(g, (width, shared), dtype),
        10.0,
    )


def _moe_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    experts = size(g, 1, 7)
    widths = (one_of(g, (8, 33)), one_of(g, (4, 17)), one_of(g, (4, 19)), experts)
    return _moe_args(g, one_of(g, (0, 1, 3, 60)), (*widths, size(g, 1, experts)), dtype)


def _moe_cost(
    x: Tensor, gate: Tensor, bias: Tensor, topk: int, scaling: float, w1: Tensor, *rest: Any
) -> tuple[int, int]:
    shared = rest[2]
    touched = min(w1.shape[0], x.shape[0] * topk)
    each, own = 3 * w1[0].numel(), 3 * shared.numel()
    flops = 2 * x.shape[0] * (topk * each + own + gate.numel())
    return (touched * each + own + 2 * x.numel()) * x.itemsize, flops


def _moe_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    widths = (192, 64, 64, 16, 2)
    return {f"{n}x192x64 2 of 16 and 1": _moe_args(seeded(0), n, widths, dtype) for n in (1, 6, 48)}


SPEC = describe(
    moe_layer,
    reference=reference_moe_layer,
    fake=like_first,
    tags=frozenset({"compute", "memory"}),
    tolerance=Tolerance(float32=(2e-5, 2e-5), bfloat16=(6e-2, 2e-2), float64=(1e-13, 1e-13)),
    cost=_moe_cost,
    cases=_moe_case,
    shapes=_moe_shapes,
    twin=False,
)
