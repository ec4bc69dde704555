"""What `mhc_post` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, shape
from deepinfer_kernels.draw import normal
from deepinfer_kernels.ops._describe import describe, like_second
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.mhc_collapse.spec import labelled_mixes, mix_sizes
from deepinfer_kernels.ops.mhc_post.reference import mhc_post as reference_mhc_post
from deepinfer_kernels.registry import Tolerance


def mhc_post(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``S'_k = post_k * y + sum_j comb[j, k] * S_j``: the sum runs over comb's first axis.

    y: [n, H]; S: [n, h, H]; post: [n, h]; comb: [n, h, h]. Returns [n, h, H] like S.
    """
    op = "mhc_post"
    floating(op, y=y, S=S, post=post, comb=comb)
    shape(op, "S", S, (None, None, None))
    n, h, H = S.shape
    shape(op, "y", y, (n, H))
    shape(op, "post", post, (n, h))
    shape(op, "comb", comb, (n, h, h))
    return dispatch(op, y, S, post, comb)


def _post_args(
    g: torch.Generator, n: int, h: int, width: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    acc = acc_dtype(dtype)
    mixes = torch.softmax(normal(g, (n, h, h), acc), dim=-1)
    return (
        normal(g, (n, width), dtype),
        normal(g, (n, h, width), dtype),
        normal(g, (n, h), acc),
        mixes,
    )


def _post_cost(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> tuple[int, int]:
    return (y.numel() + 2 * S.numel()) * S.itemsize, 2 * S.numel() * (S.shape[1] + 1)


SPEC = describe(
    mhc_post,
    reference=reference_mhc_post,
    fake=like_second,
    tags=frozenset({"memory", "latency"}),
    tolerance=Tolerance(float32=(4e-6, 4e-6), bfloat16=(4e-6, 2**-7), float64=(1e-14, 1e-14)),
    cost=_post_cost,
    cases=lambda g, dtype: _post_args(g, *mix_sizes(g), dtype),
    shapes=lambda dtype: labelled_mixes(_post_args, dtype),
)
