"""`mhc_pre_norm` as a composition of its parts: one text for every back end."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from deepinfer_kernels.ops._parts import REFERENCE, Parts


def composed(
    parts: Parts,
    S: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pre, post, comb = parts.pre(S, fn, base, scale, eps, hc_eps, iters)
    return parts.rms_norm(parts.collapse(S, pending), norm, eps), pre, post, comb


mhc_pre_norm = partial(composed, REFERENCE)
