"""`mla_sparse` by FlashMLA."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.ops._vendor import next_best, padded_slots
from deepinfer_kernels.vendors import load

LIBRARY = "flash_mla"


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    n, heads, dim = q.shape
    if q.dtype is not torch.bfloat16 or dim != 512 or heads not in (64, 128) or n == 0:
        why = "takes bfloat16, 512 channels, and 64 or 128 heads"
        return next_best("mla_sparse", why, q, kv, idx, sink, scale)
    out, _, lse = load(LIBRARY).flash_mla_sparse_fwd(
        q.contiguous(),
        kv.contiguous()[:, None],
        padded_slots(idx, kv.shape[0]),
        scale,
        512,
        attn_sink=sink.float(),
    )
    return out, lse
