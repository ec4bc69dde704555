"""`moe_layer` as a composition of its parts: one text for every back end."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import linear

from deepinfer_kernels.ops._parts import REFERENCE, Parts


def composed(
    parts: Parts,
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    topk: int,
    scaling: float,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared_w1: Tensor,
    shared_w3: Tensor,
    shared_w2: Tensor,
    limit: float,
) -> Tensor:
    idx, w = parts.gate(x, gate, bias, topk, scaling)
    hidden = parts.swiglu(linear(x, shared_w1), linear(x, shared_w3), limit)
    return parts.experts(x, idx, w, w1, w3, w2, limit) + linear(hidden, shared_w2)


moe_layer = partial(composed, REFERENCE)
