"""From the typed function of an operator to its `OpSpec`: the signature is written once, there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.registry import Kernel, OpSpec, Tag, Tolerance

__all__ = ["ROUNDED_EACH", "ROUNDED_ONCE", "describe", "like_first", "like_second"]

ROUNDED_ONCE = Tolerance(float32=(1e-6, 2e-6), bfloat16=(1e-6, 2**-7), float64=(1e-14, 1e-14))
"""Wide arithmetic and one rounding at the end: in bfloat16 two such results are one ulp apart."""

ROUNDED_EACH = Tolerance(float32=(2e-5, 2e-5), bfloat16=(4e-2, 2e-2), float64=(1e-13, 1e-13))
"""Several parts, and in bfloat16 a rounding after each. A value at the edge of two codes may take
either: records of cases with this tolerance are ``raw``."""


def like_first(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Fake form: one output shaped like the first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def like_second(first: Tensor, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Fake form: one output shaped like the second argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def describe(
    function: Kernel,
    *,
    reference: Kernel,
    fake: Kernel,
    tags: frozenset[Tag],
    tolerance: Tolerance,
    cost: Callable[..., tuple[int, int]],
    cases: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]],
    shapes: Callable[[torch.dtype], Mapping[str, tuple[Any, ...]]],
    twin: bool = True,
    mutates: tuple[str, ...] = (),
) -> OpSpec:
    """Name and schema come from ``function``; ``mutates`` names the arguments written in place."""
    return OpSpec(
        name=function.__name__,
        schema=torch.library.infer_schema(function, mutates_args=mutates),
        reference=reference,
        fake=fake,
        tags=tags,
        tolerance=tolerance,
        cost=cost,
        cases=cases,
        shapes=shapes,
        twin=twin,
        writes=tuple(list(signature(function).parameters).index(name) for name in mutates),
    )
