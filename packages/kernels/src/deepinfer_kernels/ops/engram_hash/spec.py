"""What `engram_hash` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import integer, require, shape
from deepinfer_kernels.draw import seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.engram_hash.reference import engram_hash as reference_engram_hash
from deepinfer_kernels.registry import Tolerance


def engram_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of the n-grams that end at each token; exact integer arithmetic.

    ids: int64 [n, N] compressed token ids, column i is look-back i, already padded;
    multipliers: int64 [N]; primes, offsets: int64 [N - 1, heads].
    Returns int64 [n, (N - 1) * heads], n-gram sizes 2..N outermost.
    """
    op = "engram_hash"
    integer(op, ids=ids, multipliers=multipliers, primes=primes, offsets=offsets)
    shape(op, "ids", ids, (None, None))
    grams = ids.shape[1]
    require(grams >= 2, op, f"ids has at least 2 columns, got {grams}")
    shape(op, "multipliers", multipliers, (grams,))
    shape(op, "primes", primes, (grams - 1, None))
    shape(op, "offsets", offsets, primes.shape)
    return dispatch(op, ids, multipliers, primes, offsets)


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


def _hash_fake(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    return ids.new_empty((ids.shape[0], primes.shape[0] * primes.shape[1]))


SPEC = describe(
    engram_hash,
    reference=reference_engram_hash,
    fake=_hash_fake,
    tags=frozenset({"latency"}),
    tolerance=Tolerance(),
    cost=_hash_cost,
    cases=_hash_case,
    shapes=_hash_shapes,
    twin=False,
)
