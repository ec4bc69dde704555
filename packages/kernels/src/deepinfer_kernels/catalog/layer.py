"""What a layer always calls together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.catalog.shapes import like_first
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.reference import layer as reference
from deepinfer_kernels.registry import OpSpec, Tolerance

_RECORDS = ("fp8", "fp4", "index_fp4", "raw")


def _angles(g: torch.Generator, n: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turned = normal(g, (n, pairs), torch.float64, 3.0)
    acc = acc_dtype(dtype)
    return turned.cos().to(acc), turned.sin().to(acc)


def _matrix(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return normal(g, shape, dtype, shape[-1] ** -0.5)


def _near_one(g: torch.Generator, width: int, dtype: torch.dtype) -> Tensor:
    return 1 + normal(g, (width,), acc_dtype(dtype), 0.1)


def _pre_norm_args(
    g: torch.Generator, n: int, h: int, width: int, iters: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    acc, rows = acc_dtype(dtype), h * (h + 2)
    return (
        normal(g, (n, h, width), dtype),
        normal(g, (n, h), acc),
        _matrix(g, (rows, h * width), acc),
        normal(g, (rows,), acc, 0.5),
        normal(g, (3,), acc),
        _near_one(g, width, dtype),
        1e-6,
        1e-6,
        iters,
    )


def _pre_norm_fake(S: Tensor, pending: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    acc = acc_dtype(S.dtype)
    return (
        S.new_empty((n, width)),
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h), dtype=acc),
        S.new_empty((n, h, h), dtype=acc),
    )


def _pre_norm_cost(S: Tensor, pending: Tensor, fn: Tensor, *rest: Any) -> tuple[int, int]:
    n, _, width = S.shape
    moved = (S.numel() + n * width) * S.itemsize + fn.numel() * fn.itemsize
    return moved, 2 * S.numel() * (fn.shape[0] + 2)


def _row_args(
    g: torch.Generator, n: int, dim: int, record: str, dtype: torch.dtype
) -> tuple[Any, ...]:
    return (
        normal(g, (n, dim), dtype),
        _near_one(g, dim, dtype),
        1e-6,
        *_angles(g, n, dim // 4, dtype),
        record,
    )


def _row_cost(x: Tensor, *rest: Any) -> tuple[int, int]:
    return 2 * x.numel() * x.itemsize, 12 * x.numel()


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
        _matrix(g, (rank, width), dtype),
        _near_one(g, rank, dtype),
        _matrix(g, (heads * dim, rank), dtype),
        _matrix(g, (dim, width), dtype),
        _near_one(g, dim, dtype),
        *_angles(g, n, dim // 4, dtype),
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


def _output_args(
    g: torch.Generator, n: int, widths: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[Any, ...]:
    heads, dim, groups, rank, width = widths
    return (
        normal(g, (n, heads, dim), dtype),
        *_angles(g, n, dim // 4, dtype),
        _matrix(g, (groups, rank, heads // groups * dim), dtype),
        _matrix(g, (width, groups * rank), dtype),
    )


def _output_fake(out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    return out.new_empty((out.shape[0], wo_b.shape[0]))


def _output_cost(
    out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor
) -> tuple[int, int]:
    weights = wo_a.numel() + wo_b.numel()
    moved = out.numel() + weights + out.shape[0] * wo_b.shape[0]
    return moved * out.itemsize, 2 * out.shape[0] * weights


def _moe_args(
    g: torch.Generator, n: int, widths: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[Any, ...]:
    width, inner, shared, experts, topk = widths
    acc = acc_dtype(dtype)
    return (
        normal(g, (n, width), dtype),
        _matrix(g, (experts, width), acc),
        normal(g, (experts,), acc),
        topk,
        1.5,
        _matrix(g, (experts, inner, width), dtype),
        _matrix(g, (experts, inner, width), dtype),
        _matrix(g, (experts, width, inner), dtype),
        _matrix(g, (shared, width), dtype),
        _matrix(g, (shared, width), dtype),
        _matrix(g, (width, shared), dtype),
        10.0,
    )


def _moe_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    experts = size(g, 1, 7)
    widths = (one_of(g, (8, 33)), one_of(g, (4, 17)), one_of(g, (4, 19)), experts)
    return _moe_args(g, one_of(g, (0, 1, 3, 60)), (*widths, size(g, 1, experts)), dtype)


def _moe_cost(
    x: Tensor, gate: Tensor, bias: Tensor, topk: int, scaling: float, w1: Tensor, *rest: Any
) -> tuple[int, int]:
    shared = rest[2]
    touched = min(w1.shape[0], x.shape[0] * topk)
    each, own = 3 * w1[0].numel(), 3 * shared.numel()
    flops = 2 * x.shape[0] * (topk * each + own + gate.numel())
    return (touched * each + own + 2 * x.numel()) * x.itemsize, flops


def _moe_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    widths = (192, 64, 64, 16, 2)
    return {f"{n}x192x64 2 of 16 and 1": _moe_args(seeded(0), n, widths, dtype) for n in (1, 6, 48)}


# bfloat16 rounds after each part, and a value at the edge of two codes may take either: the records
# of the cases with a tolerance are those of one code a value.
_ROUNDED = Tolerance(float32=(2e-5, 2e-5), bfloat16=(4e-2, 2e-2), float64=(1e-13, 1e-13))

SPECS = (
    OpSpec(
        name="mhc_pre_norm",
        schema=(
            "(Tensor S, Tensor pending, Tensor fn, Tensor base, Tensor scale, Tensor norm, "
            "float eps, float hc_eps, int iters) -> (Tensor, Tensor, Tensor, Tensor)"
        ),
        reference=reference.PARTS.mhc_pre_norm,
        fake=_pre_norm_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(float32=(1e-5, 2e-5), bfloat16=(2e-3, 2**-6), float64=(1e-13, 1e-13)),
        cost=_pre_norm_cost,
        cases=lambda g, dtype: _pre_norm_args(
            g,
            one_of(g, (0, 1, 7, 40)),
            one_of(g, (1, 2, 4)),
            one_of(g, (8, 16, 37)),
            one_of(g, (1, 2, 20)),
            dtype,
        ),
        shapes=lambda dtype: {
            f"{n}x4x192": _pre_norm_args(seeded(0), n, 4, 192, 20, dtype) for n in (1, 6, 48)
        },
    ),
    OpSpec(
        name="norm_rope_quant",
        schema=(
            "(Tensor x, Tensor weight, float eps, Tensor cos, Tensor sin, str record) -> Tensor"
        ),
        reference=reference.PARTS.norm_rope_quant,
        fake=like_first,
        tags=frozenset({"memory", "latency"}),
        tolerance=_ROUNDED,
        cost=_row_cost,
        cases=lambda g, dtype: _row_args(g, size(g, 0, 9), one_of(g, (32, 96)), "raw", dtype),
        shapes=lambda dtype: {
            f"fp8 {n}x64": _row_args(seeded(0), n, 64, "fp8", dtype) for n in (1, 6, 48)
        },
    ),
    OpSpec(
        name="mla_query_key",
        schema=(
            "(Tensor x, Tensor wq_a, Tensor q_norm, Tensor wq_b, Tensor wkv, Tensor kv_norm, "
            "Tensor cos, Tensor sin, float eps, str record) -> (Tensor, Tensor, Tensor)"
        ),
        reference=reference.PARTS.mla_query_key,
        fake=_query_key_fake,
        tags=frozenset({"compute", "latency"}),
        tolerance=_ROUNDED,
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
    ),
    OpSpec(
        name="mla_output",
        schema="(Tensor out, Tensor cos, Tensor sin, Tensor wo_a, Tensor wo_b) -> Tensor",
        reference=reference.PARTS.mla_output,
        fake=_output_fake,
        tags=frozenset({"compute", "latency"}),
        tolerance=_ROUNDED,
        cost=_output_cost,
        cases=lambda g, dtype: _output_args(
            g,
            one_of(g, (0, 1, 5, 60)),
            (4, one_of(g, (32, 36)), one_of(g, (1, 2, 4)), one_of(g, (3, 16)), one_of(g, (8, 37))),
            dtype,
        ),
        shapes=lambda dtype: {
            f"{n}x6x64 to 192": _output_args(seeded(0), n, (6, 64, 2, 48, 192), dtype)
            for n in (1, 6, 48)
        },
    ),
    OpSpec(
        name="moe_layer",
        schema=(
            "(Tensor x, Tensor gate, Tensor bias, int topk, float scaling, Tensor w1, Tensor w3, "
            "Tensor w2, Tensor shared_w1, Tensor shared_w3, Tensor shared_w2, float limit) "
            "-> Tensor"
        ),
        reference=reference.PARTS.moe_layer,
        fake=like_first,
        tags=frozenset({"compute", "memory"}),
        tolerance=Tolerance(float32=(2e-5, 2e-5), bfloat16=(6e-2, 2e-2), float64=(1e-13, 1e-13)),
        cost=_moe_cost,
        cases=_moe_case,
        shapes=_moe_shapes,
        twin=False,
    ),
)
