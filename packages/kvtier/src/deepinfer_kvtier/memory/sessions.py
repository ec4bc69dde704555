"""The policy `session`: keeps the conversation turns that are likely to be continued soon."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer_kvtier.memory.eviction import Name, Use
from deepinfer_kvtier.memory.hazard import EDGES_S, ReturnRates, age_bin
from deepinfer_kvtier.memory.ownership import Turn, TurnBook

KINDS = 9
_CONTINUES = 0.3
_LEARN_EVERY = 250
_LEARN_FIRST = 25
_FADE = 0.95
_AGES = len(EDGES_S)
_ADVANCE_S = 0.25
_GHOSTS = 4096
_SAME_S = 4.0


def kind_of(depth: int, tokens: int, new_tokens: int) -> int:
    """Kind of a turn: first ones by length, later ones by what they added."""
    if depth == 0:
        return 0 if tokens <= 1536 else 1 if tokens <= 10_240 else 2 if tokens <= 20_480 else 3
    if depth == 1:
        return 4 if new_tokens <= 1024 else 5 if new_tokens <= 4608 else 6
    return 7 if new_tokens <= 1024 else 8


class SessionAware(TurnBook):
    """Evicts the conversation turn that is least likely to be continued soon, deepest block first.

    A request that extends at least 0.3 of an earlier one's blocks is its next turn. How soon turns
    of a kind are continued is learned from the requests seen so far, held or not (see
    `deepinfer_kvtier.memory.hazard`). What a continued turn left behind, and a last block that is
    not full, are worth nothing.

    Turns lie in cells by kind and age. All turns of a cell have one price, so choosing a victim is
    looking for the cheapest cell that is not empty; a turn changes its cell 22 times in its life.
    """

    def __init__(self, *, remember: float = 4.0, slack: int = 1 << 14) -> None:
        super().__init__(remember=remember, slack=slack)
        self._rates = ReturnRates(KINDS)
        # Waiting turns were not continued yet; those of them that may hold blocks are in both.
        self._waiting = _cells()
        self._holding = _cells()
        self._waiting_since = [[0.0] * _AGES for _ in range(KINDS)]  # sum of `at_s`, by cell
        self._worthless: dict[Turn, None] = {}
        self._ghosts: dict[Turn, None] = {}  # waiting turns that own nothing
        self._ranked: list[dict[Turn, None]] = []
        self._rank = [[0] * _AGES for _ in range(KINDS)]
        self._cursor = 0  # cells before it are empty
        self._requests = 0
        self._now_s = 0.0
        self._aged_s = float("-inf")
        self._learn()

    def used(self, use: Use, /) -> None:
        if not use.chain:
            return
        self._advance(use.at_s)
        owners, known = self._owners(use)
        before = owners[known - 1] if known else None
        if before is not None:
            before = before.rest_of or before
        depth = 0 if before is None else self._continue(before, use, known)
        turn = self._claim(use, owners)
        turn.depth = depth
        turn.kind = kind_of(depth, use.tokens, use.tokens - known * use.block_tokens)
        self._begin(turn)
        if len(use.chain) * use.block_tokens > use.tokens:
            self._split_tail(turn)
        self._forget_oldest()
        number, self._requests = self._requests, self._requests + 1
        if number % _LEARN_EVERY == 0 or (
            number < _LEARN_EVERY and number % _LEARN_FIRST == _LEARN_FIRST - 1
        ):
            self._learn()

    @property
    def waiting(self) -> int:
        """Turns that may be continued, as far as it keeps account of them."""
        return sum(len(cell) for cells in self._waiting for cell in cells)

    def _cheapest(self, pinned: Callable[[Name], bool], patience: int | None) -> Name | None:
        found = self._first_of(self._worthless, pinned, patience)
        at = self._cursor
        while found is None and at < len(self._ranked):
            cell = self._ranked[at]
            if cell:
                found = self._first_of(cell, pinned, patience)
            if not cell and at == self._cursor:
                self._cursor += 1
            at += 1
        return found

    # -- turns

    def _continue(self, before: Turn, use: Use, known: int) -> int:
        """Depth of a turn that follows `before`: 0 when it starts something new."""
        if known < max(2, _CONTINUES * len(before.chain)) or not self._is_waiting(before):
            return 0
        again = known == len(use.chain) == len(before.chain)
        if again and self._now_s - before.at_s < _SAME_S:
            # One request may be looked up several times.
            self._stop_waiting(before)
            return before.depth
        self._observe(before, returned=True)
        return before.depth + 1

    def _begin(self, turn: Turn) -> None:
        self._waiting[turn.kind][0][turn] = None
        self._waiting_since[turn.kind][0] += turn.at_s
        self._hold(turn)

    def _split_tail(self, turn: Turn) -> None:
        """A block that is not full has another name once it is: it will not be asked for again."""
        name = turn.chain[-1]
        tail = Turn((name,), turn.at_s)
        tail.rest_of = turn
        turn.owned -= 1
        self._owner[name] = tail
        self._line[tail] = self._worthless[tail] = None
        if not turn.owned:
            del self._line[turn]
            self._emptied(turn)

    def _is_waiting(self, turn: Turn) -> bool:
        return turn in self._waiting[turn.kind][turn.age_class]

    def _observe(self, turn: Turn, *, returned: bool) -> None:
        age_s = self._now_s - turn.at_s
        self._rates.observe(turn.kind, age_s, returned=returned, counted=turn.age_class)
        self._stop_waiting(turn)

    def _stop_waiting(self, turn: Turn) -> None:
        kind, age = turn.kind, turn.age_class
        del self._waiting[kind][age][turn]
        self._waiting_since[kind][age] -= turn.at_s
        self._ghosts.pop(turn, None)
        if self._holding[kind][age].pop(turn, turn) is None:
            self._worthless[turn] = None

    def _hold(self, turn: Turn) -> None:
        kind, age = turn.kind, turn.age_class
        self._holding[kind][age][turn] = None
        self._cursor = min(self._cursor, self._rank[kind][age])

    def _requeue(self, turn: Turn) -> None:
        if self._is_waiting(turn):
            self._hold(turn)
        else:
            self._worthless[turn] = None

    def _emptied(self, turn: Turn) -> None:
        self._worthless.pop(turn, None)
        if self._is_waiting(turn):
            # It goes on waiting in vain; only the number of such turns is bounded.
            self._holding[turn.kind][turn.age_class].pop(turn, None)
            turn.chain, turn.left = (), 0
            self._ghosts[turn] = None
            if len(self._ghosts) > _GHOSTS:
                self._observe(next(iter(self._ghosts)), returned=False)

    # -- prices

    def _advance(self, now_s: float) -> None:
        """Move turns to the cells of their age, four times a second; count what they waited."""
        self._now_s = max(now_s, self._now_s)
        if self._now_s < self._aged_s + _ADVANCE_S:
            return
        self._aged_s = self._now_s
        for kind, cells in enumerate(self._waiting):
            for age in range(_AGES - 2, -1, -1):
                cell = cells[age]
                while cell:
                    turn = next(iter(cell))
                    if self._now_s - turn.at_s < EDGES_S[age + 1]:
                        break
                    self._move(turn, kind, age, age_bin(self._now_s - turn.at_s))

    def _move(self, turn: Turn, kind: int, age: int, to: int) -> None:
        cells, since = self._waiting[kind], self._waiting_since[kind]
        del cells[age][turn]
        cells[to][turn] = None
        since[age] -= turn.at_s
        since[to] += turn.at_s
        self._rates.passed(kind, age, to)
        turn.age_class = to
        if self._holding[kind][age].pop(turn, turn) is None:
            self._hold(turn)

    def _learn(self) -> None:
        """New prices. Turns still waiting count as not continued so far."""
        if self._requests > _LEARN_EVERY:
            self._rates.fade(_FADE)
        rates = self._rates.copy()
        for kind, cells in enumerate(self._waiting):
            for age, cell in enumerate(cells):
                waited_s = len(cell) * (self._now_s - EDGES_S[age]) - self._waiting_since[kind][age]
                if cell and waited_s > 0:
                    rates.waited(kind, age, waited_s)
        # Differences beyond float32 are noise of computing; of equal prices the older turn leaves.
        prices = rates.prices().astype(np.float32)
        places = [(kind, age) for kind in range(KINDS) for age in range(_AGES)]
        places.sort(key=lambda place: (prices[place], -place[1]))
        self._ranked = [self._holding[kind][age] for kind, age in places]
        for rank, (kind, age) in enumerate(places):
            self._rank[kind][age] = rank
        self._cursor = 0


def _cells() -> list[list[dict[Turn, None]]]:
    return [[{} for _ in range(_AGES)] for _ in range(KINDS)]
