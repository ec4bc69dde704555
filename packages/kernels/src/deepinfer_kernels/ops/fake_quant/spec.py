"""What `fake_quant` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating
from deepinfer_kernels.draw import normal, seeded, size
from deepinfer_kernels.formats.records import record_format
from deepinfer_kernels.ops._describe import describe, like_first
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.fake_quant.reference import fake_quant as reference_fake_quant
from deepinfer_kernels.registry import Tolerance


def fake_quant(x: Tensor, record: str) -> Tensor:
    """What a cache record makes of x: quantised and dequantised, ``unpack(pack(x))`` bit for bit.

    x: [..., D], D a multiple of the record's block. Returns a new [..., D] like x.
    """
    floating("fake_quant", x=x)
    record_format(record).check_dim(x.shape[-1] if x.dim() else 0)
    return dispatch("fake_quant", x, record)


def _quant_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    record = ("fp8", "fp4", "index_fp4")[size(g, 0, 2)]
    x = normal(g, (size(g, 0, 9), 64), torch.float64)
    return (x * torch.exp(normal(g, (x.shape[0], 1), torch.float64, 5))).to(dtype), record


def _quant_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{record} {n}x{dim}": (normal(seeded(0), (n, dim), dtype), record)
        for n, dim in ((6, 64), (48, 64), (4096, 512))
        for record in ("fp8", "fp4", "index_fp4")
    }


def _quant_cost(x: Tensor, record: str) -> tuple[int, int]:
    return 2 * x.numel() * x.itemsize, 4 * x.numel()


SPEC = describe(
    fake_quant,
    reference=reference_fake_quant,
    fake=like_first,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(),
    cost=_quant_cost,
    cases=_quant_case,
    shapes=_quant_shapes,
    twin=False,
)
