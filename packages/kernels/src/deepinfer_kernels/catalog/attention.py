"""Sparse latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.catalog.cache import load_args
from deepinfer_kernels.draw import coin, indices, normal, one_of, seeded, size
from deepinfer_kernels.formats.records import record_bytes
from deepinfer_kernels.reference import attention as reference
from deepinfer_kernels.registry import OpSpec, Tolerance


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


def _decode_args(
    g: torch.Generator,
    shape: tuple[int, int, int, int, int],
    records: tuple[str, str | None],
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    n, heads, dim, window, chosen = shape
    swa, extra = records
    swa_cache, _, _, _, _, swa_entries = load_args(g, swa, 0, 3, max(window, 1), dim, dtype)
    swa_idx = indices(g, (n, window), 3 * swa_entries, missing=0.2)
    extra_cache = extra_idx = extra_entries = None
    if extra is not None:
        extra_cache, _, _, _, _, extra_entries = load_args(g, extra, 0, 5, 16, dim, dtype)
        extra_idx = indices(g, (n, chosen), 5 * extra_entries, missing=0.2)
    sink = normal(g, (heads,), acc_dtype(dtype))
    return (
        normal(g, (n, heads, dim), dtype),
        swa_cache,
        swa_idx,
        swa,
        extra_cache,
        extra_idx,
        extra or swa,
        sink,
        dim**-0.5,
        swa_entries,
        extra_entries,
    )


def _decode_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    records = ("fp8", "fp4", "raw", "index_fp4")
    extra = one_of(g, (0, 1, 2, 3, 4))
    shape = (size(g, 0, 5), one_of(g, (1, 6)), one_of(g, (32, 64)), size(g, 0, 20), size(g, 0, 20))
    swa = records[one_of(g, (0, 2))]
    return _decode_args(g, shape, (swa, (*records, None)[extra]), dtype)


def _decode_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        "{}x{}x{} of {}+{}".format(*shape): _decode_args(seeded(0), shape, ("fp8", "fp4"), dtype)
        for shape in ((6, 6, 64, 128, 64), (48, 6, 64, 128, 64), (16, 64, 512, 128, 512))
    }


def _decode_cost(
    q: Tensor,
    swa_cache: Tensor,
    swa_idx: Tensor,
    swa_record: str,
    extra_cache: Tensor | None,
    extra_idx: Tensor | None,
    extra_record: str,
    sink: Tensor,
    scale: float,
    swa_entries: int | None = None,
    extra_entries: int | None = None,
) -> tuple[int, int]:
    heads, dim = q.shape[1:]
    moved, keys = 2 * q.numel() * q.itemsize, 0
    for idx, record in ((swa_idx, swa_record), (extra_idx, extra_record)):
        if idx is not None:
            listed = int((idx >= 0).sum())
            keys += listed
            moved += listed * record_bytes(record, dim, q.dtype)
    return moved, 4 * heads * dim * keys


def _decode_fake(q: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
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
    OpSpec(
        name="mla_decode_sparse",
        schema=(
            "(Tensor q, Tensor swa_cache, Tensor swa_idx, str swa_record, Tensor? extra_cache, "
            "Tensor? extra_idx, str extra_record, Tensor sink, float scale, "
            "int? swa_entries=None, int? extra_entries=None) -> (Tensor, Tensor)"
        ),
        reference=reference.mla_decode_sparse,
        fake=_decode_fake,
        tags=frozenset({"memory", "compute"}),
        tolerance=Tolerance(float32=(4e-6, 1e-5), bfloat16=(1e-5, 2**-7), float64=(1e-14, 1e-13)),
        cost=_decode_cost,
        cases=_decode_case,
        shapes=_decode_shapes,
        twin=False,
    ),
)
