"""`moe_gate` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.ops.moe_gate.reference import moe_gate as reference_moe_gate


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    if torch_form(x.dtype, (x,), weight, bias):
        return reference_moe_gate(x, weight, bias, topk, scaling)
    n, width = x.shape
    experts = weight.shape[0]
    acc = acc_dtype(x.dtype)
    x, weight, bias = dense(x), as_dtype(weight, acc), as_dtype(bias, acc)
    idx = x.new_empty((n, topk), dtype=torch.int64)
    w = x.new_empty((n, topk), dtype=acc)
    LIBRARY.di_moe_gate(
        CODE[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        experts if bias.dim() == 2 else 0,
        topk,
        scaling,
        n,
        width,
        experts,
        idx.data_ptr(),
        w.data_ptr(),
    )
    return idx, w
