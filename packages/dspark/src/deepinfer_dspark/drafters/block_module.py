"""What `DSparkDrafter` asks of a draft module, whatever the form of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deepinfer_dspark.drafters.contexts import Entries
from deepinfer_dspark.drafters.heads import ConfidenceHead, MarkovHead
from deepinfer_dspark.torch_extra import Tensor, torch


@dataclass(frozen=True, slots=True)
class BlockStates:
    """logits: [R, gamma, V] before the Markov bias; hidden: [R, gamma, d] for the Markov head;
    confidence_hidden: [R, gamma, d] for the confidence head (before or after the last norm)."""

    logits: Tensor
    hidden: Tensor
    confidence_hidden: Tensor


class BlockModule(Protocol):
    """A backbone that drafts a whole block in one pass, with its heads."""

    block_size: int
    window: int | None
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the features it wants."""
        ...

    def context(self, features: Tensor, positions: Tensor) -> Entries:
        """Attention entries of every layer for target features [n, m*d] at positions [n]."""
        ...

    def block(
        self, anchors: Tensor, positions: Tensor, context: Entries, visible: Tensor
    ) -> BlockStates:
        """One pass. anchors, positions: int64 [R]; context: per layer padded [R, n, ...] entries of
        positions below the anchor's; visible: bool [R, n]."""
        ...
