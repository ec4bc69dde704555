"""Dispatch and combine by DeepEP, for groups of GPUs.

Its sums differ from `ep_combine`'s in their order: a rank adds up the outputs of its own experts
for a token before they return, and the ranks' sums are added where the token came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import integer, require, shape
from deepinfer_kernels.vendors import load

__all__ = ["DeepEP", "DeepEPDispatched"]


@dataclass(frozen=True, slots=True)
class DeepEPDispatched:
    """As `Dispatched`: M assignments of a token to a slot of this rank, sorted by slot.

    x: [M, H]; slots: int64 [M]; weights: float32 [M]; counts: int64 [slots_per_rank].
    row: int64 [M] which of the ``rows`` arrived tokens each belongs to; handle: DeepEP's own.
    """

    x: Tensor
    slots: Tensor
    weights: Tensor
    counts: Tensor
    row: Tensor
    rows: int
    handle: Any


class DeepEP:
    """One buffer of DeepEP's and the calls that `ep_dispatch` and `ep_combine` stand for.

    Raises BackendError where the library is missing, of an unknown version, or does not import.
    """

    def __init__(self, group: Any, most_tokens: int, hidden: int, choices: int) -> None:
        """group: a process group of GPUs; most_tokens: of one rank and dispatch."""
        library = load("deep_ep")
        self._index_type: torch.dtype = library.topk_idx_t
        self._buffer: Any = library.EPBuffer(
            group, num_max_tokens_per_rank=most_tokens, hidden=hidden, num_topk=choices
        )
        self.size = int(group.size())

    def dispatch(
        self, x: Tensor, slots: Tensor, weights: Tensor, slots_per_rank: int
    ) -> DeepEPDispatched:
        """See `ep_dispatch`; x is bfloat16. Raises ShapeError for what does not fit."""
        op = "DeepEP.dispatch"
        require(x.dtype is torch.bfloat16, op, f"x is bfloat16, got {x.dtype}")
        integer(op, slots=slots)
        shape(op, "slots", slots, (x.shape[0], None))
        shape(op, "weights", weights, slots.shape)
        got, local, scales, handle, _ = self._buffer.dispatch(
            x.contiguous(),
            topk_idx=slots.to(self._index_type).contiguous(),
            topk_weights=weights.float().contiguous(),
            num_experts=slots_per_rank * self.size,
        )
        here = local >= 0  # other ranks' experts of a token are -1
        row, choice = here.nonzero(as_tuple=True)
        slot = local[row, choice].to(torch.int64)
        order = torch.argsort(slot, stable=True)
        row, choice, slot = row[order], choice[order], slot[order]
        return DeepEPDispatched(
            x=got[row],
            slots=slot,
            weights=scales[row, choice],
            counts=torch.bincount(slot, minlength=slots_per_rank),
            row=row,
            rows=got.shape[0],
            handle=handle,
        )

    def combine(
        self, y: Tensor, dispatched: DeepEPDispatched, residual: Tensor | None = None
    ) -> Tensor:
        """y: [M, H] the weighted outputs in the order of `dispatched`. Returns [T, H] bfloat16."""
        shape("DeepEP.combine", "y", y, (dispatched.slots.shape[0], None))
        sums = torch.zeros((dispatched.rows, y.shape[1]), dtype=torch.float32, device=y.device)
        sums.index_add_(0, dispatched.row, y.float())
        bias = None if residual is None else residual.to(torch.bfloat16)
        return self._buffer.combine(sums.to(torch.bfloat16), dispatched.handle, bias=bias)[0]
