"""What `kv_store` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import check_pages, floating, integer, shape
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.formats.records import RECORDS, record_bytes
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.kv_store.reference import kv_store as reference_kv_store
from deepinfer_kernels.registry import Tolerance


def kv_store(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    """Quantise rows and write them to their slots, in place; every other byte stays.

    x: [n, D]; cache: uint8 [P, section_bytes], any page stride; slot: int64 [n], distinct,
    -1 skips the row; record: see `deepinfer_kernels.formats`; entries: records a page holds, by
    default as many as fit. Slot s is entry ``s % entries`` of page ``s // entries``; a slot past
    the cache raises IndexError.
    """
    op = "kv_store"
    floating(op, x=x)
    integer(op, slot=slot)
    shape(op, "x", x, (None, None))
    shape(op, "slot", slot, (x.shape[0],))
    check_pages(op, cache, record, x.shape[1], x.dtype, entries)
    dispatch(op, x, cache, slot, record, entries)


def _pages(g: torch.Generator, pages: int, entries: int, width: int, gap: int) -> Tensor:
    """uint8 [pages, section] whose pages lie apart in a larger buffer, filled with finite bytes."""
    section = entries * width + gap
    buffer = torch.randint(0, 100, (pages, section + 2 * gap), generator=g, dtype=torch.uint8)
    return buffer[:, gap : gap + section]


def store_args(
    g: torch.Generator, record: str, n: int, pages: int, entries: int, dim: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    cache = _pages(g, pages, entries, record_bytes(record, dim, dtype), gap=int(dim > 32))
    slots = torch.randperm(pages * entries, generator=g)[:n]
    gone = torch.rand(slots.shape[0], generator=g) < 0.2
    x = normal(g, (slots.shape[0], dim), dtype, sigma=3)
    return x, cache, slots.masked_fill(gone, -1), record, entries


def drawn_cache(args: Any, g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    record = tuple(RECORDS)[size(g, 0, len(RECORDS) - 1)]
    return args(
        g, record, size(g, 0, 20), size(g, 1, 4), size(g, 1, 9), one_of(g, (32, 64, 96)), dtype
    )


def labelled_caches(args: Any, dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
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


def _store_fake(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    return None


SPEC = describe(
    kv_store,
    mutates=("cache",),
    reference=reference_kv_store,
    fake=_store_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(),
    cost=_store_cost,
    cases=lambda g, dtype: drawn_cache(store_args, g, dtype),
    shapes=lambda dtype: labelled_caches(store_args, dtype),
    twin=False,
)
