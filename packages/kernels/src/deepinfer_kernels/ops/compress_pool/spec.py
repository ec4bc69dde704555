"""What `compress_pool` is: its signature, checks, fake form, cost, tolerance and cases."""

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
from deepinfer_kernels.ops.compress_pool.reference import compress_pool as reference_compress_pool
from deepinfer_kernels.registry import Tolerance


def compress_pool(value: Tensor, gate: Tensor) -> Tensor:
    """Per channel, softmax of the gates over the r tokens of a group weighs their values.

    value, gate: [m, r, D]. Returns [m, D] in the accumulation dtype.
    """
    op = "compress_pool"
    floating(op, value=value, gate=gate)
    shape(op, "value", value, (None, None, None))
    shape(op, "gate", gate, value.shape)
    require(value.shape[1] >= 1, op, "a group holds at least one token")
    return dispatch(op, value, gate)


def _pool_args(g: torch.Generator, m: int, r: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return normal(g, (m, r, dim), dtype), normal(g, (m, r, dim), dtype)


def _pool_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _pool_args(g, size(g, 0, 9), one_of(g, (1, 2, 4)), one_of(g, (1, 33, 64)), dtype)


def _pool_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{m}x2x{dim}": _pool_args(seeded(0), m, 2, dim, dtype)
        for m, dim in ((3, 64), (24, 64), (4096, 512))
    }


def _pool_cost(value: Tensor, gate: Tensor) -> tuple[int, int]:
    return 2 * value.numel() * value.itemsize, 4 * value.numel()


def _pool_fake(value: Tensor, gate: Tensor) -> Tensor:
    return value.new_empty((value.shape[0], value.shape[2]), dtype=acc_dtype(value.dtype))


SPEC = describe(
    compress_pool,
    reference=reference_compress_pool,
    fake=_pool_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(float32=(1e-6, 2e-6), bfloat16=(1e-6, 2e-6), float64=(1e-14, 1e-14)),
    cost=_pool_cost,
    cases=_pool_case,
    shapes=_pool_shapes,
)
