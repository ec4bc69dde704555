"""Sparse latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.draw import coin, indices, normal, one_of, seeded, size
from deepinfer_kernels.reference import attention as reference
from deepinfer_kernels.registry import OpSpec, Tolerance


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    n, heads, dim = size(g, 0, 6), one_of(g, (1, 3, 6)), one_of(g, (8, 33, 64))
    rows, keys = size(g, 0, 40), size(g, 0, 50)
    idx = indices(g, (n, keys), rows, missing=0.3)
    if n and coin(g, 0.4):
        idx[0] = -1
    sink = normal(g, (heads,), acc_dtype(dtype))
    if coin(g, 0.4):
        sink[0] = one_of(g, (-1000, 1000)) if coin(g) else -torch.inf
    return normal(g, (n, heads, dim), dtype), normal(g, (rows, dim), dtype), idx, sink, dim**-0.5


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{n}x{heads}x{dim} of {keys}": (
            normal(g, (n, heads, dim), dtype),
            normal(g, (rows, dim), dtype),
            indices(g, (n, keys), rows, missing=0.1),
            normal(g, (heads,), acc_dtype(dtype)),
            dim**-0.5,
        )
        for n, heads, dim, rows, keys in (
            (6, 6, 64, 800, 192),
            (48, 6, 64, 800, 192),
            (16, 64, 512, 4096, 640),
        )
    }


def _cost(q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float) -> tuple[int, int]:
    _, heads, dim = q.shape
    keys = int((idx >= 0).sum())
    return 2 * q.numel() * q.itemsize + keys * dim * kv.itemsize, 4 * heads * dim * keys


def _fake(q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=acc_dtype(q.dtype))


SPECS = (
    OpSpec(
        name="mla_sparse",
        schema=("(Tensor q, Tensor kv, Tensor idx, Tensor sink, float scale) -> (Tensor, Tensor)"),
        reference=reference.mla_sparse,
        fake=_fake,
        tags=frozenset({"memory", "compute"}),
        tolerance=Tolerance(float32=(4e-6, 1e-5), bfloat16=(1e-5, 2**-7), float64=(1e-14, 1e-13)),
        cost=_cost,
        cases=_case,
        shapes=_shapes,
    ),
)
