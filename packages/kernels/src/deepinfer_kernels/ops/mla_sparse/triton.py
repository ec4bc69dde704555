# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`mla_sparse`: one program a row and 16 heads; keys are gathered once for all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.mla_sparse.reference import mla_sparse as reference_mla_sparse
from deepinfer_kernels.triton_support.lang import attend, with_sink
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def mla_sparse_kernel(
    q, kv, idx, sink, out, lse, heads, dim, rows, keys, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, DIM)
    at = (row * heads + head[:, None]) * dim + cols[None, :]
    both = (head < heads)[:, None] & (cols < dim)[None, :]
    own = tl.load(q + at, mask=both, other=0.0)
    peak = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    sums = tl.zeros((HEADS, DIM), dtype=tl.float32)
    for start in range(0, keys, KEYS):
        place = start + tl.arange(0, KEYS)
        listed = tl.load(idx + row * keys + place, mask=place < keys, other=-1)
        present = (listed >= 0) & (listed < rows)
        gathered = tl.load(
            kv + tl.where(present, listed, 0)[:, None] * dim + cols[None, :],
            mask=present[:, None] & (cols < dim)[None, :],
            other=0.0,
        )
        seen = present[None, :] & (head >= 0)[:, None]
        peak, total, sums = attend(own, gathered, gathered, seen, peak, total, sums, scale)
    ends = tl.load(sink + head, mask=head < heads, other=0.0).to(tl.float32)
    y, logs = with_sink(peak, total, sums, ends)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=both)
    tl.store(lse + row * heads + head, logs, mask=head < heads)


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if torch_form(q, kv, sink) or q.dtype != kv.dtype:
        return reference_mla_sparse(q, kv, idx, sink, scale)
    n, heads, dim = q.shape
    q = q.contiguous()
    out, lse = torch.empty_like(q), q.new_empty((n, heads), dtype=torch.float32)
    launch(
        mla_sparse_kernel,
        (n, triton.cdiv(heads, 16)),
        q,
        kv.contiguous(),
        idx.contiguous(),
        sink.contiguous(),
        out,
        lse,
        heads,
        dim,
        kv.shape[0],
        idx.shape[1],
        scale,
        HEADS=16,
        DIM=power_of_two(dim, 16),
        KEYS=32,
    )
    return out, lse
