"""Seeded drawing of arguments: the fuzz cases of `verify` and the shapes of `bench`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype

__all__ = ["angles", "coin", "indices", "matrix", "near_one", "normal", "one_of", "seeded", "size"]


def seeded(seed: int) -> torch.Generator:
    """A CPU generator with that seed."""
    return torch.Generator().manual_seed(seed)


def size(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number in low..high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def one_of(generator: torch.Generator, choices: Sequence[int]) -> int:
    """One of the given numbers."""
    return choices[size(generator, 0, len(choices) - 1)]


def coin(generator: torch.Generator, chance: float = 0.5) -> bool:
    """True with the given chance."""
    return float(torch.rand((), generator=generator)) < chance


def normal(
    generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype, sigma: float = 1.0
) -> Tensor:
    """Normal values, drawn in float64 so that every dtype sees the same case rounded."""
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * sigma).to(dtype)


def indices(
    generator: torch.Generator, shape: Sequence[int], below: int, missing: float = 0.0
) -> Tensor:
    """int64 in 0..below-1, each -1 with chance ``missing``."""
    drawn = torch.randint(0, max(below, 1), tuple(shape), generator=generator)
    gone = torch.rand(tuple(shape), generator=generator) < (1.0 if below == 0 else missing)
    return drawn.masked_fill(gone, -1)


def angles(g: torch.Generator, n: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [n, pairs] in the accumulation dtype."""
    turned = normal(g, (n, pairs), torch.float64, 3.0)
    acc = acc_dtype(dtype)
    return turned.cos().to(acc), turned.sin().to(acc)


def matrix(g: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A weight whose products keep the size of their input."""
    return normal(g, shape, dtype, shape[-1] ** -0.5)


def near_one(g: torch.Generator, width: int, dtype: torch.dtype) -> Tensor:
    """Weights of a norm."""
    return 1 + normal(g, (width,), acc_dtype(dtype), 0.1)
