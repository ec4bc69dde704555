"""The policy that knows the future: how far the others could be improved."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_kvtier.eviction import Name, Use
from deepinfer_kvtier.trace import Request


class Oracle:
    """Knows the future: the block whose next use is farthest away goes first (an upper bound)."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._number = 0
        self._held: set[Name] = set()
        self._uses: dict[Name, list[int]] = {}
        for number in range(len(requests) - 1, -1, -1):
            for block in requests[number].blocks:
                self._uses.setdefault(block, []).append(number)
        self._heap: list[tuple[int, int, Any]] = []
        self._next: dict[Name, int] = {}

    def used(self, use: Use, /) -> None:
        number, self._number = self._number, self._number + 1
        for depth, block in enumerate(use.chain):
            uses = self._uses[block]
            while uses and uses[-1] <= number:
                uses.pop()
            following = uses[-1] if uses else len(self._uses) + number + 1
            self._next[block] = following
            # Of blocks that are needed at the same time, the deepest goes first.
            heapq.heappush(self._heap, (-following, -depth, block))

    def entered(self, names: Sequence[Name], parents: Sequence[Name], at_s: float, /) -> None:
        self._held.update(names)

    def left(self, name: Name, /) -> None:
        self._held.discard(name)

    def victim(self, pinned: Callable[[Name], bool], /) -> Name | None:
        spared: list[tuple[int, int, Any]] = []
        found: Name | None = None
        while found is None and self._heap:
            entry = heapq.heappop(self._heap)
            following, _, block = entry
            if self._next[block] == -following and block in self._held:
                spared.append(entry)
                found = None if pinned(block) else block
        for entry in spared:
            heapq.heappush(self._heap, entry)
        return found
