"""Index logits, candidates and exact selection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.catalog.shapes import like_first
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.reference import indexer as reference
from deepinfer_kernels.registry import OpSpec, Tolerance


def _tied(g: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Logits as relu makes them: many exact ties at zero, of either sign, and some -inf."""
    x = normal(g, (rows, columns), acc_dtype(dtype))
    if coin(g, 0.7):
        x = (x * 2).round() / 2
    x = torch.where(x == 0, -x if coin(g) else x, x)
    gone = torch.rand(rows, columns, generator=g) < (0.3 if coin(g) else 0.0)
    return x.masked_fill(gone, -torch.inf)


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


def _select_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _tied(g, size(g, 0, 6), size(g, 0, 70), dtype), size(g, 0, 40)


def _select_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    g = seeded(0)
    return {
        f"{rows}x{columns} top {k}": (normal(g, (rows, columns), acc_dtype(dtype)), k)
        for rows, columns, k in ((6, 512, 64), (48, 512, 64), (64, 16384, 512))
    }


def _select_cost(x: Tensor, k: int) -> tuple[int, int]:
    return x.numel() * x.itemsize + x.shape[0] * k * 8, x.numel()


def _blocks_args(
    g: torch.Generator, rows: int, columns: int, block: int, top: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    visible = torch.randint(0, columns + 2, (rows,), generator=g)
    return _tied(g, rows, columns, dtype), visible, block, top


def _blocks_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _blocks_args(g, size(g, 0, 6), size(g, 0, 90), one_of(g, (1, 8)), size(g, 1, 9), dtype)


def _blocks_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{rows}x{columns} top {top} of 8": _blocks_args(seeded(0), rows, columns, 8, top, dtype)
        for rows, columns, top in ((6, 512, 16), (48, 512, 16), (64, 65536, 2048))
    }


def _blocks_cost(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> tuple[int, int]:
    return x.numel() * x.itemsize, x.numel()


def _mask_args(
    g: torch.Generator, rows: int, columns: int, block: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    kept = torch.rand(rows, -(-columns // block), generator=g) < 0.5
    return _tied(g, rows, columns, dtype), kept, block


def _mask_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _mask_args(g, size(g, 0, 6), size(g, 0, 90), one_of(g, (1, 8, 16)), dtype)


def _mask_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{rows}x{columns}": _mask_args(seeded(0), rows, columns, 8, dtype)
        for rows, columns in ((6, 512), (48, 512), (64, 65536))
    }


def _mask_cost(x: Tensor, blocks: Tensor, block_size: int) -> tuple[int, int]:
    return 2 * x.numel() * x.itemsize, x.numel()


def _logits_fake(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], k.shape[1]), dtype=acc_dtype(q.dtype))


def _select_fake(x: Tensor, k: int) -> Tensor:
    return x.new_empty((x.shape[0], k), dtype=torch.int64)


def _blocks_fake(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    blocks = (x.shape[1] + block_size - 1) // block_size
    return x.new_empty((x.shape[0], blocks), dtype=torch.bool)


SPECS = (
    OpSpec(
        name="index_logits",
        schema="(Tensor q, Tensor k, Tensor w, Tensor visible) -> Tensor",
        reference=reference.index_logits,
        fake=_logits_fake,
        tags=frozenset({"memory", "compute"}),
        # Sums of heads of either sign cancel: the bound is on the terms, not on their sum.
        tolerance=Tolerance(float32=(2e-4, 1e-5), bfloat16=(2e-4, 1e-5), float64=(1e-12, 1e-13)),
        cost=_logits_cost,
        cases=_logits_case,
        shapes=_logits_shapes,
    ),
    OpSpec(
        name="topk_select",
        schema="(Tensor x, int k) -> Tensor",
        reference=reference.topk_select,
        fake=_select_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(),
        cost=_select_cost,
        cases=_select_case,
        shapes=_select_shapes,
        twin=False,
    ),
    OpSpec(
        name="candidate_blocks",
        schema="(Tensor x, Tensor visible, int block_size, int topk_blocks) -> Tensor",
        reference=reference.candidate_blocks,
        fake=_blocks_fake,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(),
        cost=_blocks_cost,
        cases=_blocks_case,
        shapes=_blocks_shapes,
        twin=False,
    ),
    OpSpec(
        name="candidate_mask",
        schema="(Tensor x, Tensor blocks, int block_size) -> Tensor",
        reference=reference.candidate_mask,
        fake=like_first,
        tags=frozenset({"memory", "latency"}),
        tolerance=Tolerance(),
        cost=_mask_cost,
        cases=_mask_case,
        shapes=_mask_shapes,
    ),
)
