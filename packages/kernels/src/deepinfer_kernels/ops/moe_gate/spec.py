"""What `moe_gate` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.moe_gate.reference import moe_gate as reference_moe_gate
from deepinfer_kernels.registry import Tolerance


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Route by ``score = sqrt(softplus(x . weight))``; the bias ranks but does not weigh.

    x: [n, H]; weight: [E, H]; bias: [E], or [n, E] where rows differ.
    Returns (idx int64 [n, topk] best first, ties to the lower expert; w [n, topk] in the
    accumulation dtype, ``score / sum(score) * scaling``).
    """
    op = "moe_gate"
    floating(op, x=x, weight=weight, bias=bias)
    shape(op, "x", x, (None, None))
    experts = weight.shape[0]
    shape(op, "weight", weight, (None, x.shape[1]))
    shape(op, "bias", bias, (experts,) if bias.dim() == 1 else (x.shape[0], experts))
    require(1 <= topk <= experts, op, f"topk is 1..{experts}, got {topk}")
    return dispatch(op, x, weight, bias, topk, scaling)


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


def _gate_fake(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    n = x.shape[0]
    return x.new_empty((n, topk), dtype=torch.int64), x.new_empty(
        (n, topk), dtype=acc_dtype(x.dtype)
    )


SPEC = describe(
    moe_gate,
    reference=reference_moe_gate,
    fake=_gate_fake,
    tags=frozenset({"compute", "latency"}),
    tolerance=Tolerance(float32=(1e-6, 1e-5), bfloat16=(1e-6, 1e-5), float64=(1e-14, 1e-13)),
    cost=_gate_cost,
    cases=_gate_case,
    shapes=_gate_shapes,
    twin=False,
)
