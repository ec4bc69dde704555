"""`fake_quant` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, dense, torch_form
from deepinfer_kernels.native.records import record_code
from deepinfer_kernels.ops.fake_quant.reference import fake_quant as reference_fake_quant


def fake_quant(x: Tensor, record: str) -> Tensor:
    if record == "raw" or torch_form(x.dtype, (x,)):
        return reference_fake_quant(x, record)
    dim = x.shape[-1]
    code = record_code(record, dim)
    x = dense(x)
    out = torch.empty_like(x)
    LIBRARY.di_fake_quant(CODE[x.dtype], x.data_ptr(), x.numel() // dim, dim, code, out.data_ptr())
    return out
