"""`norm_rope_quant` as a composition of its parts: one text for every back end."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from deepinfer_kernels.ops._parts import REFERENCE, Parts


def composed(
    parts: Parts, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: str
) -> Tensor:
    return parts.fake_quant(parts.rope(parts.rms_norm(x, weight, eps), cos, sin, False), record)


norm_rope_quant = partial(composed, REFERENCE)
