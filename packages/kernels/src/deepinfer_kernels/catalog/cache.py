"""Cache pages and group pooling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.catalog.shapes import like_first
from deepinfer_kernels.draw import indices, normal, one_of, seeded, size
from deepinfer_kernels.formats import quant
from deepinfer_kernels.formats.records import RECORDS, record_bytes
from deepinfer_kernels.reference import cache as reference
from deepinfer_kernels.reference import compress
from deepinfer_kernels.registry import OpSpec, Tolerance


def _pages(g: torch.Generator, pages: int, entries: int, width: int, gap: int) -> Tensor:
    """uint8 [pages, section] whose pages lie apart in a larger buffer, filled with finite bytes."""
    section = entries * width + gap
    buffer = torch.randint(0, 100, (pages, section + 2 * gap), generator=g, dtype=torch.uint8)
    return buffer[:, gap : gap + section]


def _store_args(
    g: torch.Generator, record: str, n: int, pages: int, entries: int, dim: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    cache = _pages(g, pages, entries, record_bytes(record, dim, dtype), gap=int(dim > 32))
    slots = torch.randperm(pages * entries, generator=g)[:n]
    gone = torch.rand(slots.shape[0], generator=g) < 0.2
    x = normal(g, (slots.shape[0], dim), dtype, sigma=3)
    return x, cache, slots.masked_fill(gone, -1), record, entries


def load_args(
    g: torch.Generator, record: str, n: int, pages: int, entries: int, dim: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Arguments of kv_load: a cache full of stored rows, and ``n`` slots of it."""
    x, cache, _, _, _ = _store_args(g, record, pages * entries, pages, entries, dim, dtype)
    reference.kv_store(x, cache, torch.arange(x.shape[0]), record, entries)
    slot = indices(g, (n,), pages * entries, missing=0.2)
    return cache, slot, record, dim, dtype, entries


def _drawn(args: Any, g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    record = tuple(RECORDS)[size(g, 0, len(RECORDS) - 1)]
    return args(
        g, record, size(g, 0, 20), size(g, 1, 4), size(g, 1, 9), one_of(g, (32, 64, 96)), dtype
    )


def _labelled(args: Any, dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{record} {n}x{dim}": args(seeded(0), record, n, pages, 64, dim, dtype)
        for record, n, pages, dim in (
            ("fp8", 6, 4, 64),
            ("fp4", 6, 4, 64),
            ("index_fp4", 6, 4, 32),
            ("fp8", 768, 16, 64),
            ("fp4", 768, 16, 64),
            ("index_fp4", 768, 16, 32),
            ("fp8", 4096, 64, 512),
            ("fp4", 4096, 64, 512),
        )
    }


def _store_cost(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None
) -> tuple[int, int]:
    written = int((slot >= 0).sum()) * record_bytes(record, x.shape[1], x.dtype)
    return x.numel() * x.itemsize + written, 2 * x.numel()


def _load_cost(
    cache: Tensor, slot: Tensor, record: str, dim: int, dtype: torch.dtype, entries: int | None
) -> tuple[int, int]:
    read = slot.numel() * record_bytes(record, dim, dtype)
    return read + slot.numel() * dim * dtype.itemsize, slot.numel() * dim


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


def _store_fake(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    return None


def _load_fake(
    cache: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    return cache.new_empty((*slot.shape, dim), dtype=dtype)


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


SPECS = (
    OpSpec(
        name="fake_quant",
        schema="(Tensor x, str record) -> Tensor",
        reference=quant.fake_quant,
        fake=like_first,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(),
        cost=_quant_cost,
        cases=_quant_case,
        shapes=_quant_shapes,
        twin=False,
    ),
    OpSpec(
        name="compress_pool",
        schema="(Tensor value, Tensor gate) -> Tensor",
        reference=compress.compress_pool,
        fake=_pool_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(float32=(1e-6, 2e-6), bfloat16=(1e-6, 2e-6), float64=(1e-14, 1e-14)),
        cost=_pool_cost,
        cases=_pool_case,
        shapes=_pool_shapes,
    ),
    OpSpec(
        name="kv_store",
        schema=("(Tensor x, Tensor(a!) cache, Tensor slot, str record, int? entries=None) -> ()"),
        reference=reference.kv_store,
        fake=_store_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(),
        cost=_store_cost,
        cases=lambda g, dtype: _drawn(_store_args, g, dtype),
        shapes=lambda dtype: _labelled(_store_args, dtype),
        twin=False,
    ),
    OpSpec(
        name="kv_load",
        schema=(
            "(Tensor cache, Tensor slot, str record, int dim, ScalarType dtype, "
            "int? entries=None) -> Tensor"
        ),
        reference=reference.kv_load,
        fake=_load_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(),
        cost=_load_cost,
        cases=lambda g, dtype: _drawn(load_args, g, dtype),
        shapes=lambda dtype: _labelled(load_args, dtype),
        twin=False,
    ),
)
