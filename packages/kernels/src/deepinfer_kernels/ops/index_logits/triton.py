# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`index_logits`: one program a query and a run of entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.index_logits.reference import index_logits as reference_index_logits
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def index_logits_kernel(
    q, k, w, visible, out, queries, heads, dim, entries,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, HEADS)
    cols = tl.arange(0, DIM)
    both = (head < heads)[:, None] & (cols < dim)[None, :]
    own = tl.load(q + (row * heads + head[:, None]) * dim + cols[None, :], mask=both, other=0.0)
    sequence = row // queries
    both = (entry < entries)[:, None] & (cols < dim)[None, :]
    at = k + (sequence * entries + entry[:, None]) * dim + cols[None, :]
    keys = tl.load(at, mask=both, other=0.0)
    if keys.dtype == tl.float32:
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(own, tl.trans(keys))
    gain = tl.load(w + row * heads + head, mask=head < heads, other=0.0).to(tl.float32)
    logits = tl.sum(tl.maximum(scores, 0.0) * gain[:, None], axis=0)
    logits = tl.where(entry < tl.load(visible + row), logits, float("-inf"))
    tl.store(out + row * entries + entry, logits, mask=entry < entries)


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    if torch_form(q, k, w) or q.dtype != k.dtype:
        return reference_index_logits(q, k, w, visible)
    sequences, queries, heads, dim = q.shape
    entries = k.shape[1]
    out = q.new_empty((sequences, queries, entries), dtype=torch.float32)
    launch(
        index_logits_kernel,
        (sequences * queries, triton.cdiv(entries, 64)),
        q.contiguous(),
        k.contiguous(),
        w.contiguous(),
        visible.contiguous(),
        out,
        queries,
        heads,
        dim,
        entries,
        HEADS=power_of_two(heads, 16),
        DIM=power_of_two(dim, 16),
        BLOCK=64,
    )
    return out
