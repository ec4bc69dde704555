"""Index logits as two batched products; selection without a stable sort."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.ops.topk_select.reference import topk_select as reference_topk_select


def topk_select(x: Tensor, k: int) -> Tensor:
    rows, columns = x.shape
    if x.dtype is torch.float64 or rows == 0 or columns == 0 or k == 0:
        return reference_topk_select(x, k)
    taken = min(k, columns)
    # One integer key a place: the float's bits, made to order like integers, above the inverted
    # column. Keys are distinct, so the k largest are one set, and ties go to the lower column.
    wide = x.float()
    bits = torch.where(wide.isnan(), -torch.inf, wide + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ordered << 32) | torch.arange(columns - 1, -1, -1, device=x.device)
    best = torch.topk(keys, taken, dim=-1, sorted=False).values
    column = columns - 1 - (best & 0xFFFFFFFF)
    nothing = (best >> 32) == _ORDERED_MINUS_INF
    chosen = column.masked_fill_(nothing, columns).sort(dim=-1).values
    chosen.masked_fill_(chosen == columns, -1)
    return torch.nn.functional.pad(chosen, (0, k - taken), value=-1)


_ORDERED_MINUS_INF = -0x7F800001
"""Bits of -inf (0xFF800000 as int32) after the flip that makes negative floats order."""
