"""Engram: hashed n-gram rows and the gate that adds them to the residual streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, integer, require, shape
from deepinfer_kernels.ops._dispatch import kernel


def engram_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of the n-grams that end at each token; exact integer arithmetic.

    ids: int64 [n, N] compressed token ids, column i is look-back i, already padded;
    multipliers: int64 [N]; primes, offsets: int64 [N - 1, heads].
    Returns int64 [n, (N - 1) * heads], n-gram sizes 2..N outermost.
    """
    op = "engram_hash"
    integer(op, ids=ids, multipliers=multipliers, primes=primes, offsets=offsets)
    shape(op, "ids", ids, (None, None))
    grams = ids.shape[1]
    require(grams >= 2, op, f"ids has at least 2 columns, got {grams}")
    shape(op, "multipliers", multipliers, (grams,))
    shape(op, "primes", primes, (grams - 1, None))
    shape(op, "offsets", offsets, primes.shape)
    return kernel(op, ids.device)(ids, multipliers, primes, offsets)


def engram_gate(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> Tensor:
    """``S + sigmoid(sign(g) sqrt(max(|g|, 1e-6))) * value``; g is the scaled product of the norms.

    S, key: [n, h, H]; value: [n, H]; q_weight, k_weight: [h, H]; blocked: bool [n] rows whose gate
    is 0, or None. Returns [n, h, H] like S.
    """
    op = "engram_gate"
    floating(op, S=S, key=key, value=value, q_weight=q_weight, k_weight=k_weight)
    shape(op, "S", S, (None, None, None))
    shape(op, "key", key, S.shape)
    shape(op, "value", value, (S.shape[0], S.shape[2]))
    shape(op, "q_weight", q_weight, S.shape[1:])
    shape(op, "k_weight", k_weight, S.shape[1:])
    if blocked is not None:
        require(blocked.dtype is torch.bool, op, f"blocked is bool, got {blocked.dtype}")
        shape(op, "blocked", blocked, (S.shape[0],))
    return kernel(op, S.device)(S, key, value, q_weight, k_weight, eps, blocked)
