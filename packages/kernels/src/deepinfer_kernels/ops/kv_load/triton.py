# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`kv_load`: several slots a program, dequantised where they are read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.kv_load.reference import kv_load as reference_kv_load
from deepinfer_kernels.triton_support.lang import record_values
from deepinfer_kernels.triton_support.launch import launch, power_of_two
from deepinfer_kernels.triton_support.records import record_arguments


@triton.jit
def kv_load_kernel(
    cache, slot, out, stride, entries, slots, dim, count,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    own = tl.load(slot + row, mask=row < count, other=-1)
    present = (own >= 0) & (own < slots)
    safe = tl.where(present, own, 0)
    v = record_values(cache, safe, present, cols, stride, entries, dim, DATA, SCALES, RECORD, ITEM)
    at = out + row[:, None] * dim + cols[None, :]
    inside = (row < count)[:, None] & (cols < dim)[None, :]
    tl.store(at, v.to(out.dtype.element_ty), mask=inside)


def kv_load(
    cache: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    if dtype is torch.float64:
        return reference_kv_load(cache, slot, record, dim, dtype, entries)
    (_, stride, count), constants = record_arguments(cache, record, dim, dtype, entries)
    out = cache.new_empty((*slot.shape, dim), dtype=dtype)
    launch(
        kv_load_kernel,
        (triton.cdiv(slot.numel(), 4),),
        cache,
        slot.contiguous(),
        out,
        stride,
        count,
        cache.shape[0] * count,
        dim,
        slot.numel(),
        ROWS=4,
        BLOCK=power_of_two(dim),
        **constants,
    )
    return out
