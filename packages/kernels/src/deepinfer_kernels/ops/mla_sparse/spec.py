"""What `mla_sparse` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, integer, shape
from deepinfer_kernels.draw import coin, indices, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mla_sparse.reference import mla_sparse as reference_mla_sparse
from deepinfer_kernels.registry import Tolerance


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every head over listed rows of one shared key/value matrix.

    q: [n, heads, D]; kv: [M, D], key and value at once; idx: int64 [n, K] rows of kv, -1 for none;
    sink: [heads] logits that only add to the denominator, not scaled (-inf for no sink).
    Returns (out [n, heads, D] like q, lse [n, heads] in the accumulation dtype): lse is the natural
    logarithm without the sink. A row with no key gives out 0 and lse +inf. An index past M - 1
    raises IndexError. Temporaries stay below about 64 MB whatever n.
    """
    op = "mla_sparse"
    floating(op, q=q, kv=kv, sink=sink)
    integer(op, idx=idx)
    shape(op, "q", q, (None, None, None))
    shape(op, "kv", kv, (None, q.shape[2]))
    shape(op, "idx", idx, (q.shape[0], None))
    shape(op, "sink", sink, (q.shape[1],))
    return dispatch(op, q, kv, idx, sink, scale)


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    # From 8 rows on the cpu form multiplies with every row of kv instead of gathering.
    n, heads, dim = one_of(g, (0, 1, 5, 9)), one_of(g, (1, 3, 6)), one_of(g, (8, 33, 64))
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


SPEC = describe(
    mla_sparse,
    reference=reference_mla_sparse,
    fake=_fake,
    tags=frozenset({"memory", "compute"}),
    tolerance=Tolerance(float32=(4e-6, 1e-5), bfloat16=(1e-5, 2**-7), float64=(1e-14, 1e-13)),
    cost=_cost,
    cases=_case,
    shapes=_shapes,
)
