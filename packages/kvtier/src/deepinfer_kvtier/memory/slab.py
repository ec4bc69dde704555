"""Memory of host records of one size: numbered slots in one mapping, in large pages if it can be.

Slots of a batch are handed out in ascending order and, where possible, next to each other, so that
a run of blocks moves in one copy.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAP_NORESERVE = 0x4000  # Linux; the mapping is as large as the tier, used is what was touched


class Slab:
    """`count` slots of `nbytes` bytes. Not thread-safe: the host tier holds its lock.

    rows: uint8 [count, nbytes], all slots.
    warm: free slots that hold memory; the tier counts them as used until they are released.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.count = count
        self.rows: NDArray[np.uint8]
        self._memory: mmap.mmap | None = None
        if nbytes * count:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, nbytes * count, flags=flags)
            with contextlib.suppress(OSError):  # a kernel without large pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            flat: NDArray[Any] = np.frombuffer(self._memory, dtype=np.uint8)
            self.rows = flat.reshape(count, nbytes)
        else:
            self.rows = np.zeros((count, nbytes), dtype=np.uint8)
        self.warm: list[int] = []
        self._cold: list[int] = []
        self._touched = 0

    @property
    def live(self) -> int:
        """Slots that are handed out."""
        return self._touched - len(self.warm) - len(self._cold)

    def take_warm(self) -> int:
        """A free slot that holds memory already."""
        return self.warm.pop()

    def take_cold(self) -> int | None:
        """A free slot without memory; None when every slot is handed out or warm."""
        if self._cold:
            return self._cold.pop()
        if self._touched < self.count:
            self._touched += 1
            return self._touched - 1
        return None

    def give(self, slot: int) -> None:
        """Take a slot back; its memory is kept for the next record."""
        self.warm.append(slot)

    def release_warm(self) -> None:
        """Give the memory of one free slot back to the system."""
        slot = self.warm.pop()
        self._cold.append(slot)
        start = -(-slot * self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (slot + 1) * self.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        if self._memory is not None and end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def row(self, slot: int) -> NDArray[np.uint8]:
        """Bytes of one slot, uint8 [nbytes]."""
        return self.rows[slot]


def gather(slab: Slab, slots: NDArray[np.int64], target: NDArray[np.uint8]) -> None:
    """Copy slots into the rows of `target`, uint8 [len(slots), nbytes]."""
    count = len(slots)
    if _is_run(slots):
        target[:] = slab.rows[slots[0] : slots[0] + count]
    elif target.flags.c_contiguous:
        np.take(slab.rows, slots, axis=0, out=target, mode="clip")
    else:
        for i, slot in enumerate(slots.tolist()):
            target[i] = slab.rows[slot]


def scatter(source: NDArray[np.uint8], slab: Slab, slots: NDArray[np.int64]) -> None:
    """Copy the rows of `source`, uint8 [len(slots), nbytes], into slots."""
    if _is_run(slots):
        slab.rows[slots[0] : slots[0] + len(slots)] = source
        return
    for i, slot in enumerate(slots.tolist()):
        slab.rows[slot] = source[i]


def _is_run(slots: NDArray[np.int64]) -> bool:
    """Whether the slots lie next to each other in order: then one copy moves them all."""
    count = len(slots)
    return bool(slots[-1] - slots[0] == count - 1 and (slots[1:] > slots[:-1]).all())
