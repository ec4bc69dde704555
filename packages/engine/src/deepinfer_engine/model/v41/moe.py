"""The mixture of experts of a layer: in this process, or in a group that shares the experts."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.model.family import ExpertSeat
from deepinfer_engine.model.v41.config import TextConfig
from deepinfer_engine.model.v41.weights import MoeWeights


def moe(
    ops: Operators, config: TextConfig, w: MoeWeights, x: Tensor, image_rows: Tensor | None = None
) -> Tensor:
    """Routed experts plus the shared one, [n, H]; `image_rows`, bool [n]: tokens of pictures."""
    return ops.moe_layer(
        x,
        w.gate,
        _bias(w, image_rows),
        w.topk,
        config.routed_scaling_factor,
        w.w1,
        w.w3,
        w.w2,
        w.shared_w1,
        w.shared_w3,
        w.shared_w2,
        config.swiglu_limit,
    )


def moe_in_group(
    ops: Operators,
    config: TextConfig,
    w: MoeWeights,
    x: Tensor,
    image_rows: Tensor | None,
    layer: int,
    seat: ExpertSeat,
) -> Tensor:
    """The same where `w` holds this process's share of the routed experts; collective.

    Every process brings rows of its own; the gate and the shared expert are whole everywhere.
    """

    def compute(tokens: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return ops.moe_experts(tokens, slots, weights, w.w1, w.w3, w.w2, config.swiglu_limit)

    experts, weights = ops.moe_gate(
        x, w.gate, _bias(w, image_rows), w.topk, config.routed_scaling_factor
    )
    routed = seat.routed(layer, x, experts, weights, compute)
    gate, up = ops.linear(x, w.shared_w1), ops.linear(x, w.shared_w3)
    hidden = ops.swiglu(gate, up, config.swiglu_limit)
    return routed + ops.linear(hidden, w.shared_w2)


def _bias(w: MoeWeights, image_rows: Tensor | None) -> Tensor:
    """What ranks the experts, [E], or [n, E] where rows differ."""
    if image_rows is None:
        return w.bias
    assert w.bias_vl is not None, "pictures in a model that was loaded without its tower"
    return torch.where(image_rows[:, None], w.bias_vl, w.bias)
