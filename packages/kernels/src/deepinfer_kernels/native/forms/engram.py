"""Engram."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.native.forms.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.reference import engram as reference_engram


def engram_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    ids, multipliers = dense(ids), dense(multipliers)
    primes, offsets = dense(primes), dense(offsets)
    n, grams = ids.shape
    heads = primes.shape[1]
    out = torch.empty((n, (grams - 1) * heads), dtype=torch.int64)
    status = LIBRARY.di_engram_hash(
        ids.data_ptr(),
        multipliers.data_ptr(),
        primes.data_ptr(),
        offsets.data_ptr(),
        n,
        grams,
        heads,
        out.data_ptr(),
    )
    if status:
        raise ShapeError("engram_hash: every prime is at least 1")
    return out


def engram_gate(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> Tensor:
    if torch_form(S.dtype, S, key, value):
        return reference_engram.engram_gate(S, key, value, q_weight, k_weight, eps, blocked)
    n, h, width = S.shape
    streams, key, value = dense(S), dense(key), dense(value)
    acc = acc_dtype(S.dtype)
    q_weight, k_weight = as_dtype(q_weight, acc), as_dtype(k_weight, acc)
    blocked = None if blocked is None else dense(blocked)
    out = torch.empty_like(streams)
    LIBRARY.di_engram_gate(
        CODE[S.dtype],
        streams.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        eps,
        None if blocked is None else blocked.data_ptr(),
        n,
        h,
        width,
        out.data_ptr(),
    )
    return out
