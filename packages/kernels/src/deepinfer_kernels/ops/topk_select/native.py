"""`topk_select` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, dense, plain


def topk_select(x: Tensor, k: int) -> Tensor:
    plain(x)
    x = dense(x)
    rows, columns = x.shape
    out = x.new_empty((rows, k), dtype=torch.int64)
    LIBRARY.di_topk_select(CODE[x.dtype], x.data_ptr(), rows, columns, k, out.data_ptr())
    return out
