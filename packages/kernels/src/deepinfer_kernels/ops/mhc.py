"""Manifold-constrained hyper-connections. h is the number of residual streams."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.ops._dispatch import kernel


def mhc_pre(
    S: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three mixes of one sub-layer, from the normalised flattened streams.

    S: [n, h, H]; fn: [h(h+2), h*H]; base: [h(h+2)]; scale: [3]; iters: Sinkhorn iterations, >= 1.
    Returns, in the accumulation dtype: pre [n, h] = sigmoid + hc_eps, post [n, h] = 2 sigmoid,
    comb [n, h_in, h_out] whose columns (over h_in) sum to 1 up to hc_eps.
    """
    op = "mhc_pre"
    floating(op, S=S, fn=fn, base=base, scale=scale)
    shape(op, "S", S, (None, None, None))
    h, H = S.shape[1], S.shape[2]
    shape(op, "fn", fn, (h * (h + 2), h * H))
    shape(op, "base", base, (h * (h + 2),))
    shape(op, "scale", scale, (3,))
    require(iters >= 1, op, f"iters is at least 1, got {iters}")
    return kernel(op, S.device)(S, fn, base, scale, rms_eps, hc_eps, iters)


def mhc_collapse(S: Tensor, pre: Tensor) -> Tensor:
    """``sum_j pre_j * S_j``. S: [n, h, H]; pre: [n, h]. Returns [n, H] like S."""
    floating("mhc_collapse", S=S, pre=pre)
    shape("mhc_collapse", "S", S, (None, None, None))
    shape("mhc_collapse", "pre", pre, S.shape[:2])
    return kernel("mhc_collapse", S.device)(S, pre)


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
    return kernel(op, S.device)(y, S, post, comb)
