"""One record in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.quality import APPROXIMATE_BIT, GENERATION_BITS


@dataclass(slots=True, eq=False)
class HostRecord:
    """One record in memory. `pins` counts leases, running copies and the write queue.

    marks: approximate bit and replay generation, as in rows of the index.
    loose: removed while pinned; the last pin gives the memory back.
    """

    kind: int
    digest: bytes
    parent: bytes
    depth: int
    data: NDArray[np.uint8]
    marks: int
    checksum: bytes | None = None
    slot: int = -1  # of `data` in the slab of its size
    pins: int = 0
    touched: float = 0.0
    loose: bool = False

    @property
    def approximate(self) -> bool:
        """Whether it was computed from windows that bounded replay had rebuilt."""
        return bool(self.marks & APPROXIMATE_BIT)

    @property
    def generation(self) -> int:
        """How many bounded replays lie behind it."""
        return self.marks & GENERATION_BITS
