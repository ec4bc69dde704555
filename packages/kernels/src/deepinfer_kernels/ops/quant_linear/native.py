"""`quant_linear` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.formats.stored import PACKED, plain_form, stored_row_bytes
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, many_rows, torch_form
from deepinfer_kernels.ops.quant_linear.reference import quant_linear as reference_quant_linear

MANY_ROWS = 48
"""From here on torch's product of widened weights is faster for bf16."""

_STORED = {"q8_0": 0, "q4_0": 1, "q4_1": 2, "bf16": 3}
"""As the enum Stored in quant.h."""


def quant_linear(
    x: Tensor, weight: Tensor, stored: str, bias: Tensor | None = None, exact: bool = False
) -> Tensor:
    if torch_form(x.dtype, (x,), weight, bias):
        return reference_quant_linear(x, weight, stored, bias, exact)
    n, k = x.shape
    if weight.shape[1] != stored_row_bytes(stored, k):  # a shorter row would be read past its end
        raise ShapeError(
            f"quant_linear: a {stored} row of {k} channels, got {weight.shape[1]} bytes"
        )
    packed = stored.endswith(PACKED)
    if packed and (weight.shape[0] % 16 or weight.stride(0) != weight.shape[1]):
        raise ShapeError(
            f"quant_linear: {stored} rows lie in whole groups of 16, got {weight.shape}"
        )
    if stored == "bf16" and x.dtype is not torch.float64 and many_rows(n, MANY_ROWS):
        return reference_quant_linear(x, weight, stored, bias, exact)
    x = dense(x)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    if bias is not None:
        bias = as_dtype(bias, acc_dtype(x.dtype))
    out = x.new_empty((n, weight.shape[0]))
    LIBRARY.di_quant_linear(
        CODE[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        weight.stride(0),
        _STORED[plain_form(stored)],
        packed,
        None if bias is None else bias.data_ptr(),
        exact,
        n,
        weight.shape[0],
        k,
        out.data_ptr(),
    )
    return out
