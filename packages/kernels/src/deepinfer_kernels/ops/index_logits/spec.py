"""What `index_logits` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, integer, shape
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.index_logits.reference import index_logits as reference_index_logits
from deepinfer_kernels.registry import Tolerance


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    """``sum_head w_head * relu(q_head . k_e)``, -inf from entry ``visible`` on.

    q: [S, Q, hi, di]; k: [S, E, di]; w: [S, Q, hi]; visible: int64 [S, Q] entries the query sees.
    Returns [S, Q, E] in the accumulation dtype.
    """
    op = "index_logits"
    floating(op, q=q, k=k, w=w)
    integer(op, visible=visible)
    shape(op, "q", q, (None, None, None, None))
    shape(op, "k", k, (q.shape[0], None, q.shape[3]))
    shape(op, "w", w, q.shape[:3])
    shape(op, "visible", visible, q.shape[:2])
    return dispatch(op, q, k, w, visible)


def _logits_args(
    g: torch.Generator,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    sequences, queries, heads, dim, entries = shape
    visible = torch.randint(0, entries + 2, (sequences, queries), generator=g)
    return (
        normal(g, (sequences, queries, heads, dim), dtype),
        normal(g, (sequences, entries, dim), dtype),
        normal(g, (sequences, queries, heads), dtype),
        visible,
    )


def _logits_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = (size(g, 0, 3), size(g, 0, 5), one_of(g, (1, 8)), one_of(g, (8, 32)), size(g, 0, 40))
    return _logits_args(g, shape, dtype)


def _logits_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        "x".join(map(str, shape)): _logits_args(seeded(0), shape, dtype)
        for shape in ((1, 6, 8, 32, 512), (8, 6, 8, 32, 512), (1, 64, 32, 128, 4096))
    }


def _logits_cost(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> tuple[int, int]:
    sequences, queries, heads, dim = q.shape
    pairs = sequences * queries * k.shape[1]
    moved = (q.numel() + k.numel() + w.numel()) * q.itemsize + pairs * 4
    return moved, 2 * pairs * heads * (dim + 1)


def _logits_fake(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], k.shape[1]), dtype=acc_dtype(q.dtype))


SPEC = describe(
    index_logits,
    reference=reference_index_logits,
    fake=_logits_fake,
    tags=frozenset({"memory", "compute"}),
    # Sums of heads of either sign cancel: the bound is on the terms, not on their sum.
    tolerance=Tolerance(float32=(2e-4, 1e-5), bfloat16=(2e-4, 1e-5), float64=(1e-12, 1e-13)),
    cost=_logits_cost,
    cases=_logits_case,
    shapes=_logits_shapes,
)
