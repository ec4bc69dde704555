"""`moe_layer` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, few_rows
from deepinfer_kernels.ops._parts_cpu import NATIVE
from deepinfer_kernels.ops.moe_layer.reference import composed


def moe_layer(
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
    if not few_rows(x, (w1, w3, w2, shared_w1, shared_w3, shared_w2), gate, bias):
        return composed(
            NATIVE, x, gate, bias, topk, scaling, w1, w3, w2, shared_w1, shared_w3, shared_w2, limit
        )
    acc = acc_dtype(x.dtype)
    n, width = x.shape
    experts, inner, _ = w1.shape
    x, gate, bias = dense(x), as_dtype(gate, acc), as_dtype(bias, acc)
    w1, w3, w2 = dense(w1), dense(w3), dense(w2)
    shared_w1, shared_w3, shared_w2 = dense(shared_w1), dense(shared_w3), dense(shared_w2)
    out = torch.empty_like(x)
    LIBRARY.di_moe_layer(
        CODE[x.dtype],
        x.data_ptr(),
        gate.data_ptr(),
        bias.data_ptr(),
        experts if bias.dim() == 2 else 0,
        topk,
        scaling,
        w1.data_ptr(),
        w3.data_ptr(),
        w2.data_ptr(),
        shared_w1.data_ptr(),
        shared_w3.data_ptr(),
        shared_w2.data_ptr(),
        limit,
        n,
        width,
        inner,
        experts,
        shared_w1.shape[0],
        out.data_ptr(),
    )
    return out
