"""Mixture of experts."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.checks import floating, integer, require, shape
from deepinfer_kernels.ops._dispatch import kernel


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Route by ``score = sqrt(softplus(x . weight))``; the bias ranks but does not weigh.

    x: [n, H]; weight: [E, H]; bias: [E], or [n, E] where rows differ.
    Returns (idx int64 [n, topk] best first, ties to the lower expert; w [n, topk] in the
    accumulation dtype, ``score / sum(score) * scaling``).
    """
    op = "moe_gate"
    floating(op, x=x, weight=weight, bias=bias)
    shape(op, "x", x, (None, None))
    experts = weight.shape[0]
    shape(op, "weight", weight, (None, x.shape[1]))
    shape(op, "bias", bias, (experts,) if bias.dim() == 1 else (x.shape[0], experts))
    require(1 <= topk <= experts, op, f"topk is 1..{experts}, got {topk}")
    return kernel(op, x.device)(x, weight, bias, topk, scaling)


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """``sum_slot w * w2_e(swiglu(w1_e x, w3_e x))`` over the experts chosen for each row.

    x: [n, H]; idx: int64 [n, k] experts; w: [n, k]; w1, w3: [E, I, H]; w2: [E, H, I].
    The sum runs in slot order in the accumulation dtype. Returns [n, H] like x.
    """
    op = "moe_experts"
    floating(op, x=x, w=w, w1=w1, w3=w3, w2=w2)
    integer(op, idx=idx)
    shape(op, "x", x, (None, None))
    shape(op, "idx", idx, (x.shape[0], None))
    shape(op, "w", w, idx.shape)
    shape(op, "w1", w1, (None, None, x.shape[1]))
    shape(op, "w3", w3, w1.shape)
    shape(op, "w2", w2, (w1.shape[0], w1.shape[2], w1.shape[1]))
    return kernel(op, x.device)(x, idx, w, w1, w3, w2, limit)
