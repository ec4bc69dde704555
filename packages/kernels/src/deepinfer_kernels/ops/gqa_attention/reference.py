"""Causal attention of rows over the pages of their own sequence, one sequence after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype

CHUNK_BYTES = 32 << 20
"""Logits of one chunk of rows stay near this size."""


def gqa_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    start: Tensor,
    first: Tensor,
    scale: float,
) -> Tensor:
    acc = acc_dtype(q.dtype)
    entries, kv_heads = keys.shape[1], keys.shape[2]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    ends, begins = first.tolist(), start.tolist()
    for sequence, begin in enumerate(begins):
        rows, past = slice(ends[sequence], ends[sequence + 1]), ends[sequence + 1]
        count = past - rows.start
        if count == 0:
            continue
        length = begin + count
        pages = table[sequence, : -(-length // entries)]
        if pages.shape[0] * entries < length:
            raise IndexError(f"gqa_attention: the table of sequence {sequence} is too short")
        if bool(((pages < 0) | (pages >= keys.shape[0])).any()):
            raise IndexError(f"gqa_attention: a page of sequence {sequence} is outside the cache")
        k = keys[pages].flatten(0, 1)[:length].to(acc).repeat_interleave(group, dim=1)
        v = values[pages].flatten(0, 1)[:length].to(acc).repeat_interleave(group, dim=1)
        step = max(1, CHUNK_BYTES // max(1, q.shape[1] * length * acc.itemsize))
        for at in range(rows.start, past, step):
            part = slice(at, min(at + step, past))
            position = begin + torch.arange(part.start, part.stop, device=q.device) - rows.start
            out[part] = _attend(q[part].to(acc), k, v, position, scale).to(q.dtype)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> Tensor:
    logits = torch.einsum("nhd,khd->nhk", q, k) * scale
    hidden = torch.arange(k.shape[0], device=q.device) > position[:, None]
    weights = torch.softmax(logits.masked_fill(hidden[:, None], -torch.inf), dim=-1)
    # A key that a row does not see may hold NaN, which 0 * NaN would hand to it.
    out = torch.einsum("nhk,khd->nhd", weights, torch.where(v.isfinite(), v, 0))
    bad = ~v.isfinite()
    if bool(bad.any()):
        seen = torch.where(hidden[:, :, None, None], 0, torch.where(bad, v, 0)[None]).sum(1)
        out = out + seen * 0 + torch.where(seen == 0, 0, seen)
    return out
