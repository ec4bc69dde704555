"""What `qkv_rope_store` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import (
    check_angles,
    check_head_pages,
    floating,
    integer,
    require,
    shape,
)
from deepinfer_kernels.draw import angles, coin, near_one, normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.qkv_rope_store.reference import (
    qkv_rope_store as reference_qkv_rope_store,
)
from deepinfer_kernels.registry import Tolerance


def qkv_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    adjacent: bool,
    keys: Tensor,
    values: Tensor,
    slot: Tensor,
) -> Tensor:
    """Norm (optional) and rotate the queries and keys of a fused projection; keep keys and values.

    qkv: [n, heads + 2 kv_heads, D], queries, keys, values; q_norm, k_norm: [D] weights of an
    `rms_norm` over each head, or None; cos, sin: [n, R/2], turning the first R channels: channel i
    with i + R/2, or 2i with 2i + 1 when ``adjacent``; keys, values: [P, B, kv_heads, D] of qkv's
    dtype with any outer strides, written in place; slot: int64 [n], distinct,
    ``page * B + entry``, -1 keeps nothing. A slot past the cache raises IndexError and nothing is
    written. Returns the queries [n, heads, D].
    """
    op = "qkv_rope_store"
    floating(op, qkv=qkv, cos=cos, sin=sin)
    integer(op, slot=slot)
    shape(op, "qkv", qkv, (None, None, None))
    n, width, dim = qkv.shape
    check_head_pages(op, keys, values, dim, qkv.dtype)
    kv_heads = keys.shape[2]
    require(width > 2 * kv_heads, op, f"qkv has more than {2 * kv_heads} heads, got {width}")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            floating(op, **{name: norm})
            shape(op, name, norm, (dim,))
    check_angles(op, cos, sin, n, dim)
    shape(op, "slot", slot, (n,))
    return dispatch(op, qkv, q_norm, k_norm, eps, cos, sin, adjacent, keys, values, slot)


def _args(
    g: torch.Generator,
    n: int,
    heads: tuple[int, int, int],
    cache: tuple[int, int],
    pairs: int,
    normed: bool,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    own, kv, dim = heads
    # Keys and values lie side by side in one block, as a server keeps them.
    blocks = normal(g, (cache[0], 2, cache[1], kv, dim), dtype)
    slots = torch.randperm(cache[0] * cache[1], generator=g)[:n]
    n = slots.shape[0]
    gone = torch.rand(n, generator=g) < 0.2
    norms = (near_one(g, dim, dtype), near_one(g, dim, dtype)) if normed else (None, None)
    return (
        normal(g, (n, own + 2 * kv, dim), dtype),
        *norms,
        1e-6,
        *angles(g, n, pairs, dtype),
        coin(g),
        blocks[:, 0],
        blocks[:, 1],
        slots.masked_fill(gone, -1),
    )


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    kv, dim = size(g, 1, 3), one_of(g, (8, 33, 64))
    heads = (kv * size(g, 1, 4), kv, dim)
    pairs = one_of(g, (1, dim // 2))
    return _args(g, size(g, 0, 9), heads, (size(g, 1, 4), size(g, 1, 5)), pairs, coin(g), dtype)


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x{heads}+2x{kv}x{dim}": _args(
            seeded(0), n, (heads, kv, dim), (16, 128), dim // 2, False, dtype
        )
        for n, heads, kv, dim in ((1, 9, 3, 64), (32, 9, 3, 64), (256, 32, 8, 128))
    }


def _cost(qkv: Tensor, *rest: Any) -> tuple[int, int]:
    return 2 * qkv.numel() * qkv.itemsize, 6 * qkv.numel()


def _fake(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    adjacent: bool,
    keys: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] - 2 * keys.shape[2], qkv.shape[2]))


SPEC = describe(
    qkv_rope_store,
    mutates=("keys", "values"),
    reference=reference_qkv_rope_store,
    fake=_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(float32=(4e-6, 4e-6), bfloat16=(2**-7, 2**-6), float64=(1e-14, 1e-14)),
    cost=_cost,
    cases=_case,
    shapes=_shapes,
    twin=False,
)
