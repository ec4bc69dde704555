"""What host memory and the simulator ask of a policy that decides which block leaves.

A policy knows names only: in host memory they are digests of 32 bytes, in the simulator the ids of
the trace. Names of equal prefixes are equal, so the name of a block says everything before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

Name: TypeAlias = Hashable
"""A block, together with everything before it."""


class Use(NamedTuple):
    """A request asked for a prompt.

    chain:        its blocks, first to last, held or not.
    found:        how many leading ones were there (here, or in a tier below).
    tokens:       length of the prompt.
    block_tokens: tokens of a full block.
    at_s:         when, in seconds of a clock that never goes back.
    """

    chain: Sequence[Name]
    found: int
    tokens: int
    block_tokens: int
    at_s: float


class EvictionPolicy(Protocol):
    """Decides which block leaves a full cache. One object belongs to one cache.

    Calls come one at a time, under the lock of host memory: they must be quick and may not call
    back. What is held is told by `entered` and `left`; `used` may name blocks that never come.
    """

    def used(self, use: Use, /) -> None:
        """A request asked for a chain of blocks."""
        ...

    def entered(self, names: Sequence[Name], parents: Sequence[Name], at_s: float, /) -> None:
        """These blocks, first to last, are held from now on; each with the name before it."""
        ...

    def left(self, name: Name, /) -> None:
        """A block is held no longer: it was the victim, was dropped, or was damaged."""
        ...

    def victim(self, pinned: Callable[[Name], bool], /) -> Name | None:
        """Name a held block that is not pinned; None when there is none. `left` follows."""
        ...


class Lru:
    """Least recently used first, of blocks used together the head first. Only for comparison."""

    def __init__(self) -> None:
        self._order: OrderedDict[Name, None] = OrderedDict()
        self._chain: Sequence[Name] = ()  # of the last request

    def used(self, use: Use, /) -> None:
        self._chain = use.chain
        for name in use.chain:
            if name in self._order:
                self._order.move_to_end(name)

    def entered(self, names: Sequence[Name], parents: Sequence[Name], at_s: float, /) -> None:
        self._order.update(dict.fromkeys(names))
        if names and names[-1] in self._chain:
            for name in self._chain:
                if name in self._order:
                    self._order.move_to_end(name)

    def left(self, name: Name, /) -> None:
        self._order.pop(name, None)

    def victim(self, pinned: Callable[[Name], bool], /) -> Name | None:
        return next((name for name in self._order if not pinned(name)), None)
