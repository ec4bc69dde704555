# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`kv_store`: one program a row, quantised where it is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.kv_store.reference import kv_store as reference_kv_store
from deepinfer_kernels.triton_support.lang import quantised
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form
from deepinfer_kernels.triton_support.records import record_arguments


@triton.jit
def kv_store_kernel(
    x, cache, slot, stride, entries, slots, dim,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(slot + row)
    kept = (own >= 0) & (own < slots)
    narrow = tl.where(kept, own, 0).to(tl.int32)  # a division of 64 bits is a call, with a stack
    page = (narrow // entries).to(tl.int64)
    place = narrow % entries
    if RECORD == 2:
        data = page * stride + place * DATA
        scales = page * stride + entries * DATA + place * SCALES
    else:
        data = page * stride + place * (DATA + SCALES)
        scales = data + DATA
    if RECORD == 3:
        cols = tl.arange(0, BLOCKS * 32)
        inside = cols < tl.where(kept, DATA, 0)  # x is given as bytes
        raw = tl.load(x + row * DATA + cols, mask=inside, other=0)
        tl.store(cache + data + cols, raw, mask=inside)
    else:
        SIZE: tl.constexpr = 16 if RECORD == 1 else 32
        block = tl.arange(0, BLOCKS)
        within = tl.arange(0, SIZE)
        cols = block[:, None] * SIZE + within[None, :]
        own_dim = tl.where(kept, dim, 0)
        inside = cols < own_dim
        v = tl.load(x + row * dim + cols, mask=inside, other=0.0).to(tl.float32)
        codes, scale = quantised(v, RECORD)
        if RECORD == 0:
            tl.store(cache + data + cols, codes.to(tl.uint8), mask=inside)
        else:
            low, high = tl.split(tl.reshape(codes, (BLOCKS, SIZE // 2, 2)))
            pair = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
            packed = (low | (high << 4)).to(tl.uint8)
            tl.store(cache + data + pair, packed, mask=pair * 2 < own_dim)
        tl.store(cache + scales + block, scale.to(tl.uint8), mask=block * SIZE < own_dim)


def kv_store(
    x: Tensor, cache: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    if torch_form(x):
        reference_kv_store(x, cache, slot, record, entries)
        return
    n, dim = x.shape
    (_, stride, count), constants = record_arguments(cache, record, dim, x.dtype, entries)
    x = x.contiguous()
    width = 32 if record != "fp4" else 16
    if record == "raw":
        x = x.view(torch.uint8)
    launch(
        kv_store_kernel,
        (n,),
        x,
        cache,
        slot.contiguous(),
        stride,
        count,
        cache.shape[0] * count,
        dim,
        BLOCKS=power_of_two(triton.cdiv(x.shape[1], width)),
        **constants,
    )
