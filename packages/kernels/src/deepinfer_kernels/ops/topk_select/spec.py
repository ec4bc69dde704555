"""What `topk_select` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import coin, normal, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.topk_select.reference import topk_select as reference_topk_select
from deepinfer_kernels.registry import Tolerance


def topk_select(x: Tensor, k: int) -> Tensor:
    """The k largest of each row, exactly; on ties the lower index wins.

    x: [R, N]. -inf and NaN are never selected. Returns int64 [R, k]: ascending indices, then -1.
    """
    floating("topk_select", x=x)
    shape("topk_select", "x", x, (None, None))
    require(k >= 0, "topk_select", f"k is at least 0, got {k}")
    return dispatch("topk_select", x, k)


def tied_logits(g: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Logits as relu makes them: many exact ties at zero, of either sign, and some -inf."""
    x = normal(g, (rows, columns), acc_dtype(dtype))
    if coin(g, 0.7):
        x = (x * 2).round() / 2
    x = torch.where(x == 0, -x if coin(g) else x, x)
    gone = torch.rand(rows, columns, generator=g) < (0.3 if coin(g) else 0.0)
    return x.masked_fill(gone, -torch.inf)


def _select_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return tied_logits(g, size(g, 0, 6), size(g, 0, 70), dtype), size(g, 0, 40)


def _select_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{rows}x{columns} top {k}": (normal(g, (rows, columns), acc_dtype(dtype)), k)
        for rows, columns, k in ((6, 512, 64), (48, 512, 64), (64, 16384, 512))
    }


def _select_cost(x: Tensor, k: int) -> tuple[int, int]:
    return x.numel() * x.itemsize + x.shape[0] * k * 8, x.numel()


def _select_fake(x: Tensor, k: int) -> Tensor:
    return x.new_empty((x.shape[0], k), dtype=torch.int64)


SPEC = describe(
    topk_select,
    reference=reference_topk_select,
    fake=_select_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(),
    cost=_select_cost,
    cases=_select_case,
    shapes=_select_shapes,
    twin=False,
)
