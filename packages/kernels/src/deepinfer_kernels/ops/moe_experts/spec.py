"""What `moe_experts` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, integer, shape
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.moe_experts.reference import moe_experts as reference_moe_experts
from deepinfer_kernels.registry import Tolerance


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """``sum_slot w * w2_e(swiglu(w1_e x, w3_e x))`` over the experts chosen for each row.

    x: [n, H]; idx: int64 [n, k] experts; w: [n, k]; w1, w3: [E, I, H]; w2: [E, H, I].
    The sum runs in slot order in the accumulation dtype. Returns [n, H] like x.
    """
    op = "moe_experts"
    floating(op, x=x, w=w, w1=w1, w3=w3, w2=w2)
    integer(op, idx=idx)
    shape(op, "x", x, (None, None))
    shape(op, "idx", idx, (x.shape[0], None))
    shape(op, "w", w, idx.shape)
    shape(op, "w1", w1, (None, None, x.shape[1]))
    shape(op, "w3", w3, w1.shape)
    shape(op, "w2", w2, (w1.shape[0], w1.shape[2], w1.shape[1]))
    return dispatch(op, x, idx, w, w1, w3, w2, limit)


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


SPEC = describe(
    moe_experts,
    reference=reference_moe_experts,
    fake=like_first,
    tags=frozenset({"compute", "memory"}),
    # bfloat16 rounds gate, up, the product and each expert's output before the last sum.
    tolerance=Tolerance(float32=(1e-5, 1e-5), bfloat16=(3e-2, 2e-2), float64=(1e-13, 1e-13)),
    cost=_experts_cost,
    cases=_experts_case,
    shapes=_experts_shapes,
)
