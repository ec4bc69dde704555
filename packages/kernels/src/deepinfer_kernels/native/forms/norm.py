"""Normalisation, rotary embedding, gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.cpu import norm as cpu_norm
from deepinfer_kernels.native.forms.call import CODE, LIBRARY, as_dtype, dense, torch_form
from deepinfer_kernels.reference import norm as reference_norm


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if torch_form(x.dtype, x):
        return reference_norm.rms_norm(x, weight, eps)
    x, width = dense(x), x.shape[-1]
    weight = None if weight is None else as_dtype(weight, acc_dtype(x.dtype))
    pointer = None if weight is None else weight.data_ptr()
    out = torch.empty_like(x)
    rows = x.numel() // width if width else 0
    LIBRARY.di_rms_norm(CODE[x.dtype], x.data_ptr(), pointer, eps, rows, width, out.data_ptr())
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if torch_form(x.dtype, x):
        return cpu_norm.rope(x, cos, sin, inverse)
    acc = acc_dtype(x.dtype)
    x, cos, sin = dense(x), as_dtype(cos, acc), as_dtype(sin, acc)
    out = torch.empty_like(x)
    n, dim = x.shape[0], x.shape[-1]
    middle = x.numel() // (n * dim) if n and dim else 0
    LIBRARY.di_rope(
        CODE[x.dtype],
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        inverse,
        n,
        middle,
        dim,
        cos.shape[1],
        out.data_ptr(),
    )
    return out


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if torch_form(gate.dtype, gate, up):
        return reference_norm.swiglu(gate, up, limit)
    gate, up = dense(gate), dense(up)
    out = torch.empty_like(gate)
    LIBRARY.di_swiglu(
        CODE[gate.dtype], gate.data_ptr(), up.data_ptr(), limit, gate.numel(), out.data_ptr()
    )
    return out
