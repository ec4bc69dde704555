"""`engram_gate` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.engram_gate.reference import engram_gate as reference_engram_gate


def engram_gate(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> Tensor:
    if torch_form(S.dtype, (S, key, value), q_weight, k_weight, blocked):
        return reference_engram_gate(S, key, value, q_weight, k_weight, eps, blocked)
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
