# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`fake_quant`: blocks to codes and back, in integers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.formats.records import record_format
from deepinfer_kernels.ops.fake_quant.reference import fake_quant as reference_fake_quant
from deepinfer_kernels.triton_support.lang import decoded, quantised, scale_value
from deepinfer_kernels.triton_support.launch import launch, torch_form
from deepinfer_kernels.triton_support.records import RECORD


@triton.jit
def fake_quant_kernel(
    x, out, blocks, RECORD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (block < blocks)[:, None] & (tl.arange(0, SIZE) >= 0)[None, :]
    codes, scale = quantised(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), RECORD)
    y = decoded(codes, RECORD) * scale_value(scale, RECORD)[:, None]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def fake_quant(x: Tensor, record: str) -> Tensor:
    if record == "raw" or torch_form(x):
        return reference_fake_quant(x, record)
    record_format(record).check_dim(x.shape[-1])
    x = x.contiguous()
    out, size = torch.empty_like(x), 16 if record == "fp4" else 32
    blocks = x.numel() // size
    launch(
        fake_quant_kernel,
        (triton.cdiv(blocks, 32),),
        x,
        out,
        blocks,
        RECORD=RECORD[record],
        SIZE=size,
        BLOCK=32,
    )
    return out
