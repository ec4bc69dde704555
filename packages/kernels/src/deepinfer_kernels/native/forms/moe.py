"""Routing and routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.cpu import moe as cpu_moe
from deepinfer_kernels.native.forms.call import CODE, LIBRARY, as_dtype, check, dense, torch_form
from deepinfer_kernels.reference import moe as reference_moe


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    if torch_form(x.dtype, x):
        return reference_moe.moe_gate(x, weight, bias, topk, scaling)
    n, width = x.shape
    experts = weight.shape[0]
    acc = acc_dtype(x.dtype)
    x, weight, bias = dense(x), as_dtype(weight, acc), as_dtype(bias, acc)
    idx = torch.empty((n, topk), dtype=torch.int64)
    w = torch.empty((n, topk), dtype=acc)
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


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    if torch_form(x.dtype, x, w1, w3, w2):
        return cpu_moe.moe_experts(x, idx, w, w1, w3, w2, limit)
    n, topk = idx.shape
    experts, inner, width = w1.shape
    x, idx, w = dense(x), dense(idx), as_dtype(w, acc_dtype(x.dtype))
    w1, w3, w2 = dense(w1), dense(w3), dense(w2)
    out = torch.empty_like(x)
    status = LIBRARY.di_moe_experts(
        CODE[x.dtype],
        x.data_ptr(),
        idx.data_ptr(),
        w.data_ptr(),
        w1.data_ptr(),
        w3.data_ptr(),
        w2.data_ptr(),
        limit,
        n,
        topk,
        width,
        inner,
        experts,
        out.data_ptr(),
    )
    check(status, "moe_experts", f"an expert is outside 0..{experts - 1}")
    return out
