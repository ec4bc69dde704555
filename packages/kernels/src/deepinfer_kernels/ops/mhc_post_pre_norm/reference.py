"""`mhc_post_pre_norm` as a composition of its parts: one text for every back end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from deepinfer_kernels.ops.mhc_post.reference import mhc_post as reference_mhc_post
from deepinfer_kernels.ops.mhc_pre_norm.reference import mhc_pre_norm as reference_mhc_pre_norm


def composed(
    after: Callable[..., Tensor],
    before: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    y: Tensor,
    S: Tensor,
    post: Tensor,
    comb: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    streams = after(y, S, post, comb)
    return streams, *before(streams, pending, fn, base, scale, norm, eps, hc_eps, iters)


mhc_post_pre_norm = partial(composed, reference_mhc_post, reference_mhc_pre_norm)
