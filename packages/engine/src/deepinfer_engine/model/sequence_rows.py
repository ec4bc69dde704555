"""What one sequence brings to a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_engine.core.runner import IntArray
from deepinfer_engine.model.vision.image_rows import Images


@dataclass(slots=True)  # not frozen: one a sequence and step, and that takes three times as long
class SequenceRows:
    """The new tokens of one sequence in a forward pass.

    replay_from: consumer layers see and keep no window key before this position (bounded replay).
    valid_start: no layer sees a window key before it: that part of the window was lost.
    entries_from: compressed entries that close before it are in the cache already and stay as they
        are.
    """

    token_ids: IntArray
    start: int
    lookback: tuple[int, ...]
    block_table: Sequence[int]
    state_slot: int
    snapshots: tuple[tuple[int, int], ...] = ()
    replay_from: int = 0
    valid_start: int = 0
    entries_from: int = 0
    images: Images = ()
