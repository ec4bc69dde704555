# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`silu_mul`: one program a piece of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.silu_mul.reference import silu_mul as reference_silu_mul
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    g = tl.load(gate_up + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + row * width + cols, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    if torch_form(gate_up):
        return reference_silu_mul(gate_up)
    gate_up, width = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    rows = out.numel() // width if width else 0
    launch(silu_mul_kernel, (rows, triton.cdiv(width, 1024)), gate_up, out, width, BLOCK=1024)
    return out
