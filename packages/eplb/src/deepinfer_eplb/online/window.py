"""Recorded loads of one rank, in logical experts, as a ring of blocks.

Counts are converted with the map that was in force when they were taken: holding physical counts
across a rearrangement would silently corrupt the next plan. Blocks instead of steps keep the
all-reduce at check time small.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_ints, as_numpy
from deepinfer_eplb.errors import LoadError, ShapeError


class LoadWindow:
    """The last `blocks` blocks of `steps_per_block` recorded steps.

    All ranks add at the same steps, so that block b means the same steps everywhere.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(
        self, layers: int, experts: int, *, blocks: int = 32, steps_per_block: int = 4
    ) -> None:
        if min(layers, experts, blocks, steps_per_block) < 1:
            raise ShapeError(
                "LoadWindow wants positive layers, experts, blocks and steps_per_block"
            )
        self._ring = np.zeros((blocks, layers, experts), dtype=np.int64)
        self._steps = np.zeros(blocks, dtype=np.int64)
        self._per_block = steps_per_block
        self._at = 0

    def add(self, slot_counts: Any, slot_experts: npt.NDArray[np.integer[Any]]) -> None:
        """Record one step. slot_counts: int [L, C] tokens that each local slot took; slot_experts:
        int [L, C] logical expert of each local slot *at that step*."""
        counts, slot_experts = as_numpy(slot_counts), as_ints(slot_experts, "slot_experts")
        layers, experts = self._ring.shape[1:]
        if counts.shape != slot_experts.shape or counts.ndim != 2 or counts.shape[0] != layers:
            raise ShapeError(
                f"add wants counts and experts of one shape [L, C] with L = {self._ring.shape[1]}, "
                f"got {counts.shape} and {slot_experts.shape}"
            )
        if counts.size and (slot_experts.min() < 0 or slot_experts.max() >= experts):
            raise ShapeError(
                f"add wants slot_experts in 0..{experts - 1}, got {slot_experts.min()}.."
                f"{slot_experts.max()}"
            )
        # float sums of counts are common; a fraction or NaN is none
        if counts.dtype.kind not in "iubf" or (
            counts.dtype.kind == "f" and not (counts == np.floor(counts)).all()
        ):
            raise LoadError(f"slot_counts wants whole numbers, got {counts.dtype} that are not")
        if counts.size and counts.min() < 0:
            raise LoadError(
                "slot counts are negative: an int32 counter overflowed or was not reset"
            )
        if self._steps[self._at] == self._per_block:
            self._at = (self._at + 1) % self._steps.size
            self._ring[self._at] = 0
            self._steps[self._at] = 0
        layer = np.arange(counts.shape[0])[:, None]
        np.add.at(self._ring[self._at], (layer, slot_experts), counts.astype(np.int64))
        self._steps[self._at] += 1

    @property
    def recorded(self) -> int:
        """Steps in the window."""
        return int(self._steps.sum())

    def snapshot(self) -> npt.NDArray[np.int64]:
        """int64 [B, L, E]; sums of the full blocks in time order (the open one if it is alone)."""
        order = (np.arange(self._steps.size) + self._at + 1) % self._steps.size
        full = order[self._steps[order] == self._per_block]
        if full.size == 0:
            full = order[self._steps[order] > 0]
        return self._ring[full]

    def clear(self) -> None:
        """Forget everything, for instance after a change of topology."""
        self._ring[:] = 0
        self._steps[:] = 0
        self._at = 0
