"""The policy that knows the future: how far the others could be improved."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_kvtier.host.eviction import Name, Use
from deepinfer_kvtier.simulation.trace import Request


class Oracle:
    """Knows the future: the block whose next use is farthest away goes first (an upper bound)."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._number = 0
        self._held: set[Name] = set()
        self._uses: dict[Name, list[int]] = {}
        for number in range(len(requests) - 1, -1, -1):
            for block in requests[number].blocks:
                self._uses.setdefault(block, []).append(number)
        self._next: dict[Name, tuple[int, int]] = {}
        # (next use, depth), both negative, and the block; what changed since is passed over.
        self._heap: list[tuple[int, int, Any]] = []

    def used(self, use: Use, /) -> None:
        number, self._number = self._number, self._number + 1
        for depth, block in enumerate(use.chain):
            uses = self._uses[block]
            while uses and uses[-1] <= number:
                uses.pop()
            following = uses[-1] if uses else len(self._uses) + number + 1
            # Of blocks that are needed at the same time, the deepest goes first.
            self._next[block] = -following, -depth
            if block in self._held:
                heapq.heappush(self._heap, (-following, -depth, block))

    def entered(self, names: Sequence[Name], parents: Sequence[Name], at_s: float, /) -> None:
        self._held.update(names)
        for block in names:
            heapq.heappush(self._heap, (*self._next[block], block))

    def left(self, name: Name, /) -> None:
        self._held.discard(name)

    def victim(self, pinned: Callable[[Name], bool], /) -> Name | None:
        passed: list[tuple[int, int, Any]] = []
        found: Name | None = None
        while found is None and self._heap:
            following, depth, block = heapq.heappop(self._heap)
            if self._next[block] == (following, depth) and block in self._held:
                passed.append((following, depth, block))
                found = None if pinned(block) else block
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
