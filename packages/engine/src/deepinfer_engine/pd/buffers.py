"""Memory for units that come and go over a connection, used again and again: its pages are there,
and lie in a cache."""

from __future__ import annotations

from collections import deque

import numpy as np

MOST_SPARE = 6
"""Buffers that a connection keeps."""


class Buffers:
    def __init__(self) -> None:
        self._spare: list[memoryview] = []
        """Buffers that hold nothing now."""
        self._unsent: deque[tuple[int, memoryview]] = deque()
        """Those that are being sent, with the byte of the stream that each ends before."""
        self._queued = 0

    def take(self, size: int) -> memoryview:
        """What it holds is of another unit."""
        for i, spare in enumerate(self._spare):
            if spare.nbytes >= size:
                return self._spare.pop(i)[:size]
        return np.empty(size, dtype=np.uint8).data

    def back(self, buffer: memoryview) -> None:
        whole = memoryview(buffer.obj)
        self._spare.append(whole)
        if len(self._spare) > MOST_SPARE:
            self._spare.remove(min(self._spare, key=len))

    def queued(self, size: int, buffer: memoryview | None = None) -> None:
        """So much was handed over to be sent; of that `buffer` comes last."""
        self._queued += size
        if buffer is not None:
            self._unsent.append((self._queued, buffer))

    def sent(self, left: int) -> None:
        """All but so many bytes of what was queued have left."""
        while self._unsent and self._unsent[0][0] <= self._queued - left:
            self.back(self._unsent.popleft()[1])
