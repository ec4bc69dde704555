"""`candidate_blocks` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, dense, plain


def candidate_blocks(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    plain(x, visible)
    x, visible = dense(x), dense(visible)
    rows, columns = x.shape
    block_size = min(block_size, max(columns, 1))  # sums of both must fit
    out = x.new_empty((rows, -(-columns // block_size)), dtype=torch.bool)
    LIBRARY.di_candidate_blocks(
        CODE[x.dtype],
        x.data_ptr(),
        visible.data_ptr(),
        rows,
        columns,
        block_size,
        topk_blocks,
        out.data_ptr(),
    )
    return out
