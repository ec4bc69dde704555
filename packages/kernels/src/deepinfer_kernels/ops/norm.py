"""Normalisation, rotary embedding and the gated activation."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.ops._dispatch import kernel


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight``, computed wide and rounded once.

    x: [..., N]; weight: [N], a plain multiplier, or None. Returns [..., N] like x.
    """
    floating("rms_norm", x=x)
    require(x.dim() >= 1, "rms_norm", "x is [..., N], got a scalar")
    if weight is not None:
        floating("rms_norm", weight=weight)
        shape("rms_norm", "weight", weight, (x.shape[-1],))
    return kernel("rms_norm", x.device)(x, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last R channels of each row, adjacent pairs (2i, 2i+1) as complex numbers.

    x: [n, ..., D]; cos, sin: [n, R/2] in the accumulation dtype, one angle a row and pair.
    ``inverse`` turns back. Returns [n, ..., D] like x; channels before the last R are copied.
    """
    floating("rope", x=x, cos=cos, sin=sin)
    require(x.dim() >= 2, "rope", f"x is [n, ..., D], got {list(x.shape)}")
    shape("rope", "cos", cos, (x.shape[0], None))
    shape("rope", "sin", sin, cos.shape)
    require(
        2 * cos.shape[1] <= x.shape[-1],
        "rope",
        f"cos turns {2 * cos.shape[1]} channels but x has {x.shape[-1]}",
    )
    return kernel("rope", x.device)(x, cos, sin, inverse)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``, computed wide and rounded once.

    gate, up: the same shape; limit may be inf. Returns that shape like gate.
    """
    floating("swiglu", gate=gate, up=up)
    shape("swiglu", "up", up, gate.shape)
    require(limit > 0, "swiglu", f"limit is positive, got {limit}")
    return kernel("swiglu", gate.device)(gate, up, limit)
