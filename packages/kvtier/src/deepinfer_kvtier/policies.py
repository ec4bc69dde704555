"""Policies that decide which block leaves a full prefix cache."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer_kvtier.hazard import ReturnRates, age_bins


@dataclass(frozen=True, slots=True)
class Request:
    """One request: arrival in seconds, prompt length in tokens, ids of its blocks.

    cls: retention class of its blocks, where lifetimes are simulated by class.
    """

    at_s: float
    tokens: int
    blocks: tuple[int, ...]
    cls: str = "chat"


class EvictionPolicy(Protocol):
    """Decides which block leaves. `use` is called for every request, in order of arrival."""

    def use(self, request: Request, number: int) -> None: ...

    def victim(self) -> int:
        """Name a block that leaves now, and forget that it is held."""
        ...


class Lru:
    """Least recently used first. `tail_first` makes the end of a chain older than its head."""

    def __init__(self, *, tail_first: bool) -> None:
        self._tail_first = tail_first
        self._order: OrderedDict[int, None] = OrderedDict()

    def use(self, request: Request, number: int) -> None:
        for block in reversed(request.blocks) if self._tail_first else request.blocks:
            self._order[block] = None
            self._order.move_to_end(block)

    def victim(self) -> int:
        return self._order.popitem(last=False)[0]


class Oracle:
    """Knows the future: the block whose next use is farthest away goes first (an upper bound)."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._uses: dict[int, list[int]] = {}
        for number in range(len(requests) - 1, -1, -1):
            for block in requests[number].blocks:
                self._uses.setdefault(block, []).append(number)
        self._heap: list[tuple[int, int, int]] = []
        self._next: dict[int, int] = {}

    def use(self, request: Request, number: int) -> None:
        for depth, block in enumerate(request.blocks):
            uses = self._uses[block]
            while uses and uses[-1] <= number:
                uses.pop()
            following = uses[-1] if uses else len(self._uses) + number + 1
            self._next[block] = following
            # Of blocks that are needed at the same time, the deepest goes first.
            heapq.heappush(self._heap, (-following, -depth, block))

    def victim(self) -> int:
        while True:
            following, _, block = heapq.heappop(self._heap)
            if self._next.get(block) == -following:
                del self._next[block]
                return block


@dataclass(slots=True, eq=False)
class _Turn:
    """One request of a conversation. `held` are the cached blocks that no later one has used.

    rest_of: for a last block that is kept apart, the turn it belongs to.
    """

    at_s: float
    kind: int
    depth: int
    blocks: tuple[int, ...]
    held: set[int]
    worthless: bool = False
    rest_of: _Turn | None = None


class SessionAware:
    """Evicts the conversation turn that is least likely to be continued soon, deepest block first.

    A request that extends at least `continues` of an earlier one's blocks is its next turn.
    How soon turns of a kind are continued is learned from the requests seen so far, cached or not
    (`deepinfer_kvtier.hazard`); of those, the blocks of the last `memory_blocks` are remembered.
    What a continued turn left behind, and a last block that is not full, are worth nothing.
    """

    def __init__(
        self, *, block_tokens: int, continues: float = 0.3, memory_blocks: int = 1 << 20
    ) -> None:
        self._block_tokens = block_tokens
        self._continues = continues
        self._memory_blocks = memory_blocks
        self._rates = ReturnRates(KINDS)
        self._prices = self._rates.prices()
        self._owner: OrderedDict[int, _Turn] = OrderedDict()
        self._waiting: dict[_Turn, None] = {}
        self._holding: dict[_Turn, None] = {}
        self._queue: list[int] = []
        self._now_s = 0.0

    def use(self, request: Request, number: int) -> None:
        self._now_s = request.at_s
        known, before = self._longest_known(request.blocks)
        depth = 0
        if before in self._waiting and known >= 2 and known >= self._continues * len(before.blocks):
            self._rates.observe(before.kind, request.at_s - before.at_s, returned=True)
            del self._waiting[before]
            before.worthless = True
            depth = before.depth + 1
        kind = kind_of(depth, len(request.blocks), len(request.blocks) - known)
        turn = _Turn(request.at_s, kind, depth, request.blocks, set(request.blocks))
        for block in request.blocks:
            owner = self._owner.pop(block, None)
            if owner is not None:
                owner.held.discard(block)
            self._owner[block] = turn
        self._waiting[turn] = self._holding[turn] = None
        self._queue = []
        if request.tokens % self._block_tokens and request.blocks[-1:]:
            self._split_tail(turn)
        self._forget_oldest()
        if number % _LEARN_EVERY == 0 or (number < _LEARN_EVERY and number % 25 == 24):
            self._learn()

    def victim(self) -> int:
        if not self._queue:
            self._queue = self._order()
        block = self._queue.pop()
        self._owner[block].held.discard(block)
        return block

    @property
    def remembered(self) -> int:
        """Blocks whose last use is known, cached or not."""
        return len(self._owner)

    def _longest_known(self, blocks: Sequence[int]) -> tuple[int, _Turn]:
        """How many leading blocks were seen before, and the turn that used the last of them."""
        known, before = 0, _NOBODY
        for block in blocks:
            owner = self._owner.get(block)
            if owner is None:
                break
            known, before = known + 1, owner.rest_of or owner
        return known, before

    def _split_tail(self, turn: _Turn) -> None:
        """A block that is not full has another name once it is: it will not be asked for again."""
        last = turn.blocks[-1]
        turn.held.discard(last)
        tail = _Turn(turn.at_s, turn.kind, turn.depth, (last,), {last}, True, turn)
        self._owner[last] = tail
        self._holding[tail] = None

    def _forget_oldest(self) -> None:
        """What is cached must stay known, and goes to the end of the line instead."""
        looked = 0
        while len(self._owner) > self._memory_blocks and looked < _ENOUGH:
            block, turn = next(iter(self._owner.items()))
            if block in turn.held:
                self._owner.move_to_end(block)
                looked += 1
                continue
            del self._owner[block]
            if turn in self._waiting:
                del self._waiting[turn]
                self._rates.observe(turn.kind, self._now_s - turn.at_s, returned=False)

    def _learn(self) -> None:
        """Turns still waiting count as not continued so far."""
        rates = self._rates.copy()
        for turn in self._waiting:
            rates.observe(turn.kind, self._now_s - turn.at_s, returned=False)
        self._prices = rates.prices()

    def _order(self) -> list[int]:
        """Blocks to evict, the first one last; enough for one request."""
        turns = self._holding = {turn: None for turn in self._holding if turn.held}
        ages = np.array([self._now_s - turn.at_s for turn in turns])
        prices = self._prices[[turn.kind for turn in turns], age_bins(ages)]
        prices[[turn.worthless for turn in turns]] = -1.0
        listed = list(turns)
        chosen: list[int] = []
        for at in np.lexsort((-ages, prices)):
            turn = listed[at]
            chosen.extend(block for block in reversed(turn.blocks) if block in turn.held)
            if len(chosen) >= _ENOUGH:
                break
        return chosen[::-1]


_NOBODY = _Turn(0.0, 0, 0, (), set())
_LEARN_EVERY = 250
_ENOUGH = 64

KINDS = 9


def kind_of(depth: int, blocks: int, new: int) -> int:
    """Kind of a turn: first ones by length, later ones by what they added."""
    if depth == 0:
        return 0 if blocks <= 3 else 1 if blocks <= 20 else 2 if blocks <= 40 else 3
    if depth == 1:
        return 4 if new <= 2 else 5 if new <= 9 else 6
    return 7 if new <= 2 else 8


POLICIES: dict[str, Callable[[Sequence[Request], int], EvictionPolicy]] = {
    "lru": lambda requests, block_tokens: Lru(tail_first=False),
    "tail-lru": lambda requests, block_tokens: Lru(tail_first=True),
    "session": lambda requests, block_tokens: SessionAware(block_tokens=block_tokens),
    "oracle": lambda requests, block_tokens: Oracle(requests),
}
