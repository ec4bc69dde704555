"""Which rows of a forward pass are tokens of pictures, and what stands there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Images = tuple[tuple[int, Tensor], ...]
"""(offset into a sequence's new tokens, embeddings [k, H]) of each run of picture tokens."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of a batch that belong to pictures."""

    rows: Tensor
    """[m]"""
    embeddings: Tensor
    """[m, H], what stands there in place of the token's embedding."""
    mask: Tensor
    """bool [n]"""

    @staticmethod
    def build(images: Sequence[Images], first_rows: Sequence[int], n: int) -> ImageRows | None:
        """Of a batch of `n` rows; None when there is no picture: text alone pays nothing."""
        if not any(images):
            return None
        parts = [
            (torch.arange(len(embedded)) + first + offset, embedded)
            for of_sequence, first in zip(images, first_rows, strict=True)
            for offset, embedded in of_sequence
        ]
        rows = torch.cat([where for where, _ in parts])
        mask = torch.zeros(n, dtype=torch.bool)
        mask[rows] = True
        return ImageRows(rows, torch.cat([embedded for _, embedded in parts]), mask)


def without_first(images: Images, dropped: int) -> Images:
    """What is left when a sequence's first `dropped` new tokens are."""
    moved = [(offset - dropped, embedded) for offset, embedded in images]
    return tuple(
        (max(offset, 0), embedded[max(-offset, 0) :])
        for offset, embedded in moved
        if offset + len(embedded) > 0
    )
