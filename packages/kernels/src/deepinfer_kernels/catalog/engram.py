"""Engram hashing and gating."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.catalog.shapes import like_first
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.reference import engram as reference
from deepinfer_kernels.registry import OpSpec, Tolerance

LARGEST_VOCABULARY = 99092


def _hash_args(g: torch.Generator, n: int, grams: int, heads: int) -> tuple[Any, ...]:
    bound = (2**63 - 1) // LARGEST_VOCABULARY // 2  # products of ids and multipliers fit int64
    primes = torch.randint(3, 16_000_463, (grams - 1, heads), generator=g)
    return (
        torch.randint(0, LARGEST_VOCABULARY, (n, grams), generator=g),
        torch.randint(0, bound, (grams,), generator=g) * 2 + 1,
        primes,
        torch.cumsum(primes.flatten(), 0).view_as(primes) - primes,
    )


def _hash_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _hash_args(g, size(g, 0, 9), size(g, 2, 4), size(g, 1, 8))


def _hash_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x{grams}x{heads}": _hash_args(seeded(0), n, grams, heads)
        for n, grams, heads in ((6, 3, 2), (48, 3, 2), (8192, 4, 8))
    }


def _hash_cost(
    ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> tuple[int, int]:
    return 8 * (ids.numel() + ids.shape[0] * primes.numel()), 2 * ids.shape[0] * primes.numel()


def _gate_args(
    g: torch.Generator, n: int, h: int, width: int, blocked: bool, dtype: torch.dtype
) -> tuple[Any, ...]:
    return (
        normal(g, (n, h, width), dtype),
        normal(g, (n, h, width), dtype),
        normal(g, (n, width), dtype),
        normal(g, (h, width), dtype),
        normal(g, (h, width), dtype),
        1e-20,
        torch.rand(n, generator=g) < 0.3 if blocked else None,
    )


def _gate_case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return _gate_args(g, size(g, 0, 7), one_of(g, (1, 4)), one_of(g, (8, 37)), coin(g), dtype)


def _gate_shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x4x{width}": _gate_args(seeded(0), n, 4, width, False, dtype)
        for n, width in ((6, 192), (48, 192), (256, 5120))
    }


def _gate_cost(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> tuple[int, int]:
    return (2 * S.numel() + key.numel() + value.numel()) * S.itemsize, 9 * S.numel()


def _hash_fake(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    return ids.new_empty((ids.shape[0], primes.shape[0] * primes.shape[1]))


SPECS = (
    OpSpec(
        name="engram_hash",
        schema="(Tensor ids, Tensor multipliers, Tensor primes, Tensor offsets) -> Tensor",
        reference=reference.engram_hash,
        fake=_hash_fake,
        tags=frozenset({"latency"}),
        tolerance=Tolerance(),
        cost=_hash_cost,
        cases=_hash_case,
        shapes=_hash_shapes,
        twin=False,
    ),
    OpSpec(
        name="engram_gate",
        schema=(
            "(Tensor S, Tensor key, Tensor value, Tensor q_weight, Tensor k_weight, float eps, "
            "Tensor? blocked) -> Tensor"
        ),
        reference=reference.engram_gate,
        fake=like_first,
        tags=frozenset({"memory", "latency"}),
        # The square root near g = 0 magnifies the rounding of g; the gate itself is below 1.
        tolerance=Tolerance(float32=(2e-4, 1e-5), bfloat16=(2e-4, 2**-7), float64=(1e-7, 1e-12)),
        cost=_gate_cost,
        cases=_gate_case,
        shapes=_gate_shapes,
    ),
)
