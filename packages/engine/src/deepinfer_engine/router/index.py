"""Which worker holds which blocks of prompts: one bit for each worker, one number for each block.

What a prompt's leading blocks have in common is found by walking its chain once, for all workers
together. A worker that told nothing, or of which something was missed, holds nothing: unknown is
not the same as what was true once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer_engine.core.block_hashes import CacheTier


@dataclass(frozen=True, slots=True)
class Overlap:
    """Leading blocks of a prompt that a worker has: in its memory, and at all."""

    memory: int = 0
    whole: int = 0


NOTHING = Overlap()


@dataclass(slots=True)
class _Member:
    bit: int
    store: str
    """Workers of one store read what the others wrote there; empty: its own alone."""
    held: dict[CacheTier, set[int]] = field(
        default_factory=lambda: {"memory": set[int](), "below": set[int]()}
    )


class PrefixIndex:
    """All changes and lookups belong to one thread."""

    def __init__(self) -> None:
        self._members: dict[Hashable, _Member] = {}
        self._tables: dict[CacheTier, dict[int, int]] = {"memory": {}, "below": {}}
        self._free: list[int] = []
        self._stores: dict[str, int] = {}
        """Bits of the workers of each store that several have."""

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return len(self._tables["memory"].keys() | self._tables["below"].keys())

    def join(self, worker: Hashable, store: str = "") -> None:
        """A worker, that holds nothing yet."""
        self.leave(worker)
        bit = self._free.pop() if self._free else 1 << len(self._members)
        self._members[worker] = _Member(bit, store)
        self._share()

    def leave(self, worker: Hashable) -> None:
        """Forget a worker and all that it held."""
        member = self._members.pop(worker, None)
        if member is not None:
            self._clear(member)
            self._free.append(member.bit)
            self._share()

    def clear(self, worker: Hashable) -> None:
        """What it holds is not known any more."""
        self._clear(self._members[worker])

    def stored(self, worker: Hashable, tier: CacheTier, blocks: Iterable[int]) -> None:
        member, table = self._members[worker], self._tables[tier]
        for block in blocks:
            table[block] = table.get(block, 0) | member.bit
            member.held[tier].add(block)

    def removed(self, worker: Hashable, tier: CacheTier, blocks: Iterable[int]) -> None:
        member = self._members[worker]
        self._remove(member, tier, blocks)
        member.held[tier].difference_update(blocks)

    def overlaps(self, chain: Sequence[int]) -> Mapping[Hashable, Overlap]:
        """For each worker, how much of a prompt it has; workers that have nothing are left out."""
        memory = self._depths(chain, shared=False)
        whole = self._depths(chain, shared=True)
        return {
            worker: Overlap(memory.get(member.bit, 0), depth)
            for worker, member in self._members.items()
            if (depth := whole.get(member.bit, 0))
        }

    def _depths(self, chain: Sequence[int], *, shared: bool) -> dict[int, int]:
        """Bit of a worker -> leading blocks, for those with any; `shared`: in whatever tier."""
        memory, below = self._tables["memory"], self._tables["below"]
        groups = [g for g in self._stores.values() if g & (g - 1)] if shared else []
        found: dict[int, int] = {}
        left = -1
        for depth, block in enumerate(chain):
            have = memory.get(block, 0)
            if shared and (told := below.get(block, 0)):
                have |= told
                for group in groups:
                    if told & group:
                        have |= group
            now = left & have
            if now != left:
                if depth:
                    _note(found, left & ~now, depth)
                left = now
                if not left:
                    return found
        if chain:
            _note(found, left, len(chain))
        return found

    def _clear(self, member: _Member) -> None:
        for tier, blocks in member.held.items():
            self._remove(member, tier, blocks)
            blocks.clear()

    def _remove(self, member: _Member, tier: CacheTier, blocks: Iterable[int]) -> None:
        table = self._tables[tier]
        for block in blocks:
            left = table.get(block, 0) & ~member.bit
            if left:
                table[block] = left
            else:
                table.pop(block, None)

    def _share(self) -> None:
        self._stores = {}
        for member in self._members.values():
            if member.store:
                self._stores[member.store] = self._stores.get(member.store, 0) | member.bit


def _note(found: dict[int, int], bits: int, depth: int) -> None:
    while bits > 0:
        bit = bits & -bits
        found[bit] = depth
        bits ^= bit
