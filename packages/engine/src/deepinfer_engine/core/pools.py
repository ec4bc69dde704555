"""Who owns which block and state slot. Ids only; the bytes are the runner's.

Id 0 is scratch and never handed out. Free ids are reused first in, first out, so that a freed id
stays unused for as long as possible. A reference count above one means several owners: a block
under a prefill-to-decode transfer belongs to its request *and* to its writer, and is free when
both let go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Fit = Literal["ok", "later", "never"]


class PoolError(RuntimeError):
    """A block or slot was given back twice, or used without being owned: a bug in this program."""


class IdPool:
    """Reference-counted ids `1 .. count - 1`."""

    what: ClassVar[str] = "id"

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError(
                f"a pool needs scratch id 0 and one more, got {count} ids of {self.what}s"
            )
        self._references = [0] * count
        self._free = deque(range(1, count))

    @property
    def capacity(self) -> int:
        """Ids that can be owned at a time."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> int:
        return self.capacity - self.free

    def fit(self, n: int) -> Fit:
        """`never`: not even an empty pool could give n ids."""
        if n > self.capacity:
            return "never"
        return "ok" if n <= self.free else "later"

    def take(self, n: int) -> list[int] | None:
        """n ids with one owner each, or None when there are not enough now."""
        if n > len(self._free):
            return None
        ids = [self._free.popleft() for _ in range(n)]
        for i in ids:
            self._references[i] = 1
        return ids

    def pin(self, ids: Iterable[int]) -> None:
        """Add an owner to ids that have one."""
        ids = list(ids)
        for i in ids:
            self._check(i)
        for i in ids:
            self._references[i] += 1

    def give(self, ids: Sequence[int]) -> None:
        """Remove one owner of each id, last id first; an id without owners becomes free."""
        for i in reversed(ids):
            self._check(i)
            self._references[i] -= 1
            if self._references[i] == 0:
                self._free.append(i)

    def _check(self, i: int) -> None:
        if not 0 < i < len(self._references) or self._references[i] == 0:
            raise PoolError(f"{self.what} {i} has no owner: given back twice, or never taken")

    def audit(self) -> None:
        """Raise PoolError unless every id is either free once or referenced."""
        free = set(self._free)
        referenced = {i for i, n in enumerate(self._references) if n > 0}
        if len(free) != len(self._free) or 0 in free or 0 in referenced:
            raise PoolError(f"a {self.what} is listed free twice, or scratch id 0 was handed out")
        if free & referenced or len(free) + len(referenced) != self.capacity:
            raise PoolError(
                f"{len(free)} free and {len(referenced)} referenced {self.what}s do not make "
                f"{self.capacity}; both: {sorted(free & referenced)[:5]}"
            )


class BlockPool(IdPool):
    """Blocks of compressed KV."""

    what = "block"


class StatePool(IdPool):
    """State slots: what exists once per sequence."""

    what = "state slot"


class NoStates:
    """The slots of a model that keeps no state: everyone has slot 0, and none can run out."""

    capacity = free = owned = 0

    def take(self, n: int) -> list[int]:
        return [0] * n

    def pin(self, ids: Iterable[int]) -> None:
        """Nothing is owned."""

    def give(self, ids: Sequence[int]) -> None:
        """Nothing was owned."""

    def audit(self) -> None:
        """Nothing can be lost."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Both pools of one runner; blocks and a slot are taken together or not at all."""

    blocks: BlockPool
    states: StatePool | NoStates

    @classmethod
    def of(cls, num_blocks: int, num_state_slots: int, *, stateless: bool = False) -> Pools:
        return cls(BlockPool(num_blocks), NoStates() if stateless else StatePool(num_state_slots))

    def take(self, n_blocks: int) -> tuple[list[int], int] | None:
        """`n_blocks` blocks and one state slot, or None."""
        if n_blocks > self.blocks.free:
            return None
        slot = self.states.take(1)
        if slot is None:
            return None
        blocks = self.blocks.take(n_blocks)
        if blocks is None:  # pragma: no cover - checked above
            raise PoolError("a pool gave less than it had free")
        return blocks, slot[0]

    def pin(self, blocks: Sequence[int], state_slot: int) -> None:
        self.states.pin([state_slot])
        self.blocks.pin(blocks)

    def give(self, blocks: Sequence[int], state_slot: int) -> None:
        self.states.give([state_slot])
        self.blocks.give(blocks)

    def audit(self) -> None:
        self.blocks.audit()
        self.states.audit()
