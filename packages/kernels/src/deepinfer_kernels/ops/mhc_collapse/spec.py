"""What `mhc_collapse` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, shape
from deepinfer_kernels.draw import normal, one_of, seeded, size
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mhc_collapse.reference import mhc_collapse as reference_mhc_collapse
from deepinfer_kernels.registry import Tolerance


def mhc_collapse(S: Tensor, pre: Tensor) -> Tensor:
    """``sum_j pre_j * S_j``. S: [n, h, H]; pre: [n, h]. Returns [n, H] like S."""
    floating("mhc_collapse", S=S, pre=pre)
    shape("mhc_collapse", "S", S, (None, None, None))
    shape("mhc_collapse", "pre", pre, S.shape[:2])
    return dispatch("mhc_collapse", S, pre)


def _collapse_args(
    g: torch.Generator, n: int, h: int, width: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    return normal(g, (n, h, width), dtype), normal(g, (n, h), acc_dtype(dtype))


def _collapse_fake(S: Tensor, pre: Tensor) -> Tensor:
    return S.new_empty((S.shape[0], S.shape[2]))


def mix_sizes(g: torch.Generator) -> tuple[int, int, int]:
    return size(g, 0, 7), one_of(g, (1, 2, 4)), one_of(g, (1, 16, 37))


def labelled_mixes(args: Any, dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{n}x4x{width}": args(seeded(0), n, 4, width, dtype)
        for n, width in ((6, 192), (48, 192), (256, 5120))
    }


def _collapse_cost(S: Tensor, pre: Tensor) -> tuple[int, int]:
    return (S.numel() + S.numel() // max(S.shape[1], 1)) * S.itemsize, 2 * S.numel()


SPEC = describe(
    mhc_collapse,
    reference=reference_mhc_collapse,
    fake=_collapse_fake,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(float32=(2e-6, 2e-6), bfloat16=(2e-6, 2**-7), float64=(1e-14, 1e-14)),
    cost=_collapse_cost,
    cases=lambda g, dtype: _collapse_args(g, *mix_sizes(g), dtype),
    shapes=lambda dtype: labelled_mixes(_collapse_args, dtype),
)
