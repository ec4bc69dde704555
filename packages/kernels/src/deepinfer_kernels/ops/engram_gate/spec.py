"""What `engram_gate` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.engram_gate.reference import engram_gate as reference_engram_gate
from deepinfer_kernels.registry import Tolerance


def engram_gate(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> Tensor:
    """``S + sigmoid(sign(g) sqrt(max(|g|, 1e-6))) * value``; g is the scaled product of the norms.

    S, key: [n, h, H]; value: [n, H]; q_weight, k_weight: [h, H]; blocked: bool [n] rows whose gate
    is 0, or None. Returns [n, h, H] like S.
    """
    op = "engram_gate"
    floating(op, S=S, key=key, value=value, q_weight=q_weight, k_weight=k_weight)
    shape(op, "S", S, (None, None, None))
    shape(op, "key", key, S.shape)
    shape(op, "value", value, (S.shape[0], S.shape[2]))
    shape(op, "q_weight", q_weight, S.shape[1:])
    shape(op, "k_weight", k_weight, S.shape[1:])
    if blocked is not None:
        require(blocked.dtype is torch.bool, op, f"blocked is bool, got {blocked.dtype}")
        shape(op, "blocked", blocked, (S.shape[0],))
    return dispatch(op, S, key, value, q_weight, k_weight, eps, blocked)


def _gate_args(
    g: torch.Generator, n: int, h: int, width: int, blocked: bool, dtype: torch.dtype
) -> tuple[Any, ...]:
    return (
        normal(g, (n, h, width), dtype),
        normal(g, (n, h, width), dtype),
        normal(g, (n, width), dtype),
        normal(g, (h, width), dtype),
        normal(g, (h, width), dtype),
        1e-20,
        torch.rand(n, generator=g) < 0.3 if blocked else None,
    )


def _gate_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _gate_args(g, size(g, 0, 7), one_of(g, (1, 4)), one_of(g, (8, 37)), coin(g), dtype)


def _gate_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x4x{width}": _gate_args(seeded(0), n, 4, width, False, dtype)
        for n, width in ((6, 192), (48, 192), (256, 5120))
    }


def _gate_cost(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> tuple[int, int]:
    return (2 * S.numel() + key.numel() + value.numel()) * S.itemsize, 9 * S.numel()


SPEC = describe(
    engram_gate,
    reference=reference_engram_gate,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    # The square root near g = 0 magnifies the rounding of g; the gate itself is below 1.
    tolerance=Tolerance(float32=(2e-4, 1e-5), bfloat16=(2e-4, 2**-7), float64=(1e-7, 1e-12)),
    cost=_gate_cost,
    cases=_gate_case,
    shapes=_gate_shapes,
)
