"""What `mla_query_key` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import check_angles, floating, require, shape
from deepinfer_kernels.draw import angles, matrix, near_one, normal, one_of, seeded, size
from deepinfer_kernels.formats.records import record_format
from deepinfer_kernels.ops._describe import ROUNDED_EACH, describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mla_query_key.reference import mla_query_key as reference_mla_query_key


def mla_query_key(
    x: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    record: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The low-rank query and the latent key of each row.

    x: [n, H]; wq_a: [r, H]; q_norm: [r]; wq_b: [heads * D, r]; wkv: [D, H]; kv_norm: [D];
    cos, sin: [n, R/2]. Returns, like x: latent [n, r] = rms_norm(wq_a x), q [n, heads, D] =
    rope(wq_b latent), key [n, D] = norm_rope_quant(wkv x).
    """
    op = "mla_query_key"
    floating(op, x=x, wq_a=wq_a, q_norm=q_norm, wq_b=wq_b, wkv=wkv, kv_norm=kv_norm)
    shape(op, "x", x, (None, None))
    n, width = x.shape
    shape(op, "wq_a", wq_a, (None, width))
    rank = wq_a.shape[0]
    shape(op, "q_norm", q_norm, (rank,))
    shape(op, "wkv", wkv, (None, width))
    dim = wkv.shape[0]
    shape(op, "kv_norm", kv_norm, (dim,))
    shape(op, "wq_b", wq_b, (None, rank))
    require(
        dim > 0 and wq_b.shape[0] % dim == 0,
        op,
        f"wq_b has a multiple of {dim} rows, got {wq_b.shape[0]}",
    )
    check_angles(op, cos, sin, n, dim)
    record_format(record).check_dim(dim)
    return dispatch(op, x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin, eps, record)


def _query_key_args(
    g: torch.Generator,
    n: int,
    widths: tuple[int, int, int, int],
    record: str,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    width, rank, heads, dim = widths
    return (
        normal(g, (n, width), dtype),
        matrix(g, (rank, width), dtype),
        near_one(g, rank, dtype),
        matrix(g, (heads * dim, rank), dtype),
        matrix(g, (dim, width), dtype),
        near_one(g, dim, dtype),
        *angles(g, n, dim // 4, dtype),
        1e-6,
        record,
    )


def _query_key_fake(
    x: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    n, dim = x.shape[0], wkv.shape[0]
    return (
        x.new_empty((n, wq_a.shape[0])),
        x.new_empty((n, wq_b.shape[0] // dim, dim)),
        x.new_empty((n, dim)),
    )


def _query_key_cost(
    x: Tensor, wq_a: Tensor, q_norm: Tensor, wq_b: Tensor, wkv: Tensor, *rest: Any
) -> tuple[int, int]:
    weights = wq_a.numel() + wq_b.numel() + wkv.numel()
    out = x.shape[0] * (wq_a.shape[0] + wq_b.shape[0] + wkv.shape[0])
    return (x.numel() + weights + out) * x.itemsize, 2 * x.shape[0] * weights


SPEC = describe(
    mla_query_key,
    reference=reference_mla_query_key,
    fake=_query_key_fake,
    tags=frozenset({"compute", "latency"}),
    tolerance=ROUNDED_EACH,
    cost=_query_key_cost,
    cases=lambda g, dtype: _query_key_args(
        g,
        one_of(g, (0, 1, 5, 60)),
        (one_of(g, (8, 37)), one_of(g, (5, 32)), size(g, 1, 5), one_of(g, (32, 64))),
        "raw",
        dtype,
    ),
    shapes=lambda dtype: {
        f"fp8 {n}x192 6x64": _query_key_args(seeded(0), n, (192, 96, 6, 64), "fp8", dtype)
        for n in (1, 6, 48)
    },
)
