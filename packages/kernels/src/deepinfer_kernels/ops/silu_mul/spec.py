"""What `silu_mul` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require
from deepinfer_kernels.draw import normal, seeded, size
from deepinfer_kernels.ops._describe import ROUNDED_ONCE, describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.silu_mul.reference import silu_mul as reference_silu_mul


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of one fused projection, computed wide and rounded once.

    gate_up: [..., 2 I], the gates first. Returns [..., I] like gate_up. `swiglu` has a limit and
    takes two tensors.
    """
    op = "silu_mul"
    floating(op, gate_up=gate_up)
    even = gate_up.dim() >= 1 and gate_up.shape[-1] % 2 == 0
    require(even, op, f"gate_up is [..., 2 I], got {list(gate_up.shape)}")
    return dispatch(op, gate_up)


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x{width}": (normal(seeded(0), (n, 2 * width), dtype),)
        for n, width in ((1, 1536), (32, 1536), (1024, 8192))
    }


def _cost(gate_up: Tensor) -> tuple[int, int]:
    return gate_up.numel() * gate_up.itemsize * 3 // 2, 4 * gate_up.numel()


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


SPEC = describe(
    silu_mul,
    reference=reference_silu_mul,
    fake=_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=ROUNDED_ONCE,
    cost=_cost,
    cases=lambda g, dtype: (normal(g, (size(g, 0, 5), 2 * size(g, 1, 70)), dtype, 8),),
    shapes=_shapes,
)
