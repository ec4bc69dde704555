"""What `kv_load` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import FLOATING, check_pages, integer, require
from deepinfer_kernels.draw import indices
from deepinfer_kernels.formats.records import record_bytes
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.kv_load.reference import kv_load as reference_kv_load
from deepinfer_kernels.ops.kv_store.reference import kv_store as reference_kv_store
from deepinfer_kernels.ops.kv_store.spec import drawn_cache, labelled_caches, store_args
from deepinfer_kernels.registry import Tolerance


def kv_load(
    cache: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    """Read slots and dequantise them; the inverse of `kv_store`.

    cache: uint8 [P, section_bytes]; slot: int64 [...], -1 gives zeros; dim: channels of a record.
    Returns [..., dim] in ``dtype``.
    """
    op = "kv_load"
    integer(op, slot=slot)
    require(dtype in FLOATING, op, f"dtype is float32, bfloat16 or float64, got {dtype}")
    check_pages(op, cache, record, dim, dtype, entries)
    return dispatch(op, cache, slot, record, dim, dtype, entries)


def load_args(
    g: torch.Generator, record: str, n: int, pages: int, entries: int, dim: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Arguments of kv_load: a cache full of stored rows, and ``n`` slots of it."""
    x, cache, _, _, _ = store_args(g, record, pages * entries, pages, entries, dim, dtype)
    reference_kv_store(x, cache, torch.arange(x.shape[0]), record, entries)
    slot = indices(g, (n,), pages * entries, missing=0.2)
    return cache, slot, record, dim, dtype, entries


def _load_cost(
    cache: Tensor, slot: Tensor, record: str, dim: int, dtype: torch.dtype, entries: int | None
) -> tuple[int, int]:
    read = slot.numel() * record_bytes(record, dim, dtype)
    return read + slot.numel() * dim * dtype.itemsize, slot.numel() * dim


def _load_fake(
    cache: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    return cache.new_empty((*slot.shape, dim), dtype=dtype)


SPEC = describe(
    kv_load,
    reference=reference_kv_load,
    fake=_load_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(),
    cost=_load_cost,
    cases=lambda g, dtype: drawn_cache(load_args, g, dtype),
    shapes=lambda dtype: labelled_caches(load_args, dtype),
    twin=False,
)
