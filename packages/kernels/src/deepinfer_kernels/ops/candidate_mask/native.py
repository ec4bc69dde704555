"""`candidate_mask` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.native.call import CODE, LIBRARY, dense, torch_form
from deepinfer_kernels.ops.candidate_mask.reference import (
    candidate_mask as reference_candidate_mask,
)


def candidate_mask(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    if torch_form(x.dtype, (x,), blocks):
        return reference_candidate_mask(x, blocks, block_size)
    x, blocks = dense(x), dense(blocks)
    block_size = min(block_size, max(x.shape[1], 1))  # sums of both must fit
    out = torch.empty_like(x)
    LIBRARY.di_candidate_mask(
        CODE[x.dtype],
        x.data_ptr(),
        blocks.data_ptr(),
        x.shape[0],
        x.shape[1],
        block_size,
        out.data_ptr(),
    )
    return out
