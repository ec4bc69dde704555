"""How likely a conversation is to come back, learned while serving.

Each turn of a conversation belongs to a kind (how many turns came before, how much it added). For
every kind this counts, by the time since the turn, how often the next turn followed and how long
turns waited without one. From these rates follows a price for keeping the turn's blocks: the best
ratio of expected hits to expected time of occupation over all times at which one could still
stop waiting. Pricing by this ratio is Gittins' index policy for one store of limited size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.host.eviction import ChainBook, Name, RequestNode, Use

EDGES_S: Final = (
    *(0, 4, 8, 15, 25, 40, 60, 80, 100, 125, 150, 180, 220, 270, 330, 400, 500, 650, 850),
    *(1100, 1500, 2200, 3600, 7200, 14_400, 28_800, 57_600, 115_200, 230_400, 460_800),
)
"""Bounds of the age classes, seconds; the last one is open."""

_LAST_BIN_S = 460_800.0
_BINS = len(EDGES_S)
_WIDTHS = np.append(np.diff(EDGES_S).astype(np.float64), _LAST_BIN_S)


_PRIOR_RETURNS = 20.0
_MIDDLES = np.asarray(EDGES_S) + _WIDTHS / 2
_PRIOR_WAITED_S = _PRIOR_RETURNS * (_MIDDLES + 60.0) / 0.5
"""What is believed of all kinds before anything was seen, in each age class: the longer a turn
waits, the less likely it is continued (0.5 / (age + 60 s)), so that prices start out as those of
LRU."""


class ReturnRates:
    """Counts of returns and of waiting time, by kind of turn and age.

    kinds:  how many kinds there are.
    doubt:  returns' worth of belief in the average of all kinds before a kind's own counts matter.
    """

    def __init__(self, kinds: int, *, doubt: float = 10.0) -> None:
        self._returns: NDArray[np.float64] = np.zeros((kinds, _BINS))
        self._waited_s: NDArray[np.float64] = np.zeros((kinds, _BINS))
        self._doubt = doubt

    def observe(self, kind: int, age_s: float, *, returned: bool, counted: int = 0) -> None:
        """A turn of this kind waited `age_s` seconds, and then its next turn came or did not.

        counted: age classes whose time was counted before, by `passed`.
        """
        at = age_bin(age_s)
        self.passed(kind, counted, at)
        self._waited_s[kind, at] += age_s - EDGES_S[at]
        if returned:
            self._returns[kind, at] += 1

    def passed(self, kind: int, first: int, end: int) -> None:
        """A turn of this kind waited through these age classes, `end` not included."""
        self._waited_s[kind, first:end] += _WIDTHS[first:end]

    def waited(self, kind: int, at: int, seconds: float) -> None:
        """Turns of this kind and age class have waited so long in it and still do."""
        self._waited_s[kind, at] += seconds

    def fade(self, share: float) -> None:
        """Let everything counted so far weigh less, so that traffic may change its ways."""
        self._returns *= share
        self._waited_s *= share

    def waited_s(self) -> float:
        """All the waiting time that was observed, seconds."""
        return float(self._waited_s.sum())

    def copy(self) -> ReturnRates:
        """An independent copy, for counts that are not final."""
        other = ReturnRates(len(self._returns), doubt=self._doubt)
        other._returns[:] = self._returns
        other._waited_s[:] = self._waited_s
        return other

    def rates(self) -> NDArray[np.float64]:
        """Returns a second, (kinds, ages): own counts drawn towards kind average and shape of all.

        A kind's expected rate is the rate of all kinds at that age, times one factor for the kind.
        """
        common = (self._returns.sum(0) + _PRIOR_RETURNS) / (self._waited_s.sum(0) + _PRIOR_WAITED_S)
        expected = (self._waited_s * common).sum(1)
        factor = (self._returns.sum(1) + self._doubt) / (expected + self._doubt)
        believed = np.maximum(common[None, :] * factor[:, None], 1e-9)
        return (self._returns + self._doubt) / (self._waited_s + self._doubt / believed)

    def prices(self) -> NDArray[np.float64]:
        """Hits a second of occupation that a turn is still worth, (kinds, ages)."""
        rates = self.rates()
        chance = 1 - np.exp(-rates * _WIDTHS)
        best = np.zeros_like(rates)
        for start in range(_BINS):
            alive = np.cumprod(1 - chance[:, start:], axis=1)
            reached = np.concatenate((np.ones((len(rates), 1)), alive[:, :-1]), axis=1)
            hits = np.cumsum(reached * chance[:, start:], axis=1)
            # Expected time in a class whose rate is constant: chance of leaving it over the rate.
            seconds = np.cumsum(reached * chance[:, start:] / rates[:, start:], axis=1)
            best[:, start] = (hits / seconds).max(axis=1)
        return best


def age_bin(age_s: float) -> int:
    """Index of the age class; negative ages count as 0."""
    return max(0, bisect_right(EDGES_S, age_s) - 1)


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


class SessionAware(ChainBook):
    """Evicts the conversation turn that is least likely to be continued soon, deepest block first.

    A request that extends at least 0.3 of an earlier one's blocks is its next turn. How soon turns
    of a kind are continued is learnt from those seen. Turns that have been continued, and a last
    block that is not full, are worth nothing.

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
        self._worthless: dict[RequestNode, None] = {}
        self._ghosts: dict[RequestNode, None] = {}  # waiting turns that own nothing
        self._ranked: list[dict[RequestNode, None]] = []
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
        node = self._claim(use, owners)
        node.depth = depth
        node.kind = kind_of(depth, use.tokens, use.tokens - known * use.block_tokens)
        self._begin(node)
        if len(use.chain) * use.block_tokens > use.tokens:
            self._split_tail(node)
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

    def _continue(self, before: RequestNode, use: Use, known: int) -> int:
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

    def _begin(self, node: RequestNode) -> None:
        self._waiting[node.kind][0][node] = None
        self._waiting_since[node.kind][0] += node.at_s
        self._hold(node)

    def _split_tail(self, node: RequestNode) -> None:
        """A block that is not full has another name once it is: it will not be asked for again."""
        name = node.chain[-1]
        tail = RequestNode((name,), node.at_s)
        tail.rest_of = node
        node.owned -= 1
        self._owner[name] = tail
        self._line[tail] = self._worthless[tail] = None
        if not node.owned:
            del self._line[node]
            self._emptied(node)

    def _is_waiting(self, node: RequestNode) -> bool:
        return node in self._waiting[node.kind][node.age_class]

    def _observe(self, node: RequestNode, *, returned: bool) -> None:
        age_s = self._now_s - node.at_s
        self._rates.observe(node.kind, age_s, returned=returned, counted=node.age_class)
        self._stop_waiting(node)

    def _stop_waiting(self, node: RequestNode) -> None:
        kind, age = node.kind, node.age_class
        del self._waiting[kind][age][node]
        self._waiting_since[kind][age] -= node.at_s
        self._ghosts.pop(node, None)
        if self._holding[kind][age].pop(node, node) is None:
            self._worthless[node] = None

    def _hold(self, node: RequestNode) -> None:
        kind, age = node.kind, node.age_class
        self._holding[kind][age][node] = None
        self._cursor = min(self._cursor, self._rank[kind][age])

    def _requeue(self, node: RequestNode) -> None:
        if self._is_waiting(node):
            self._hold(node)
        else:
            self._worthless[node] = None

    def _emptied(self, node: RequestNode) -> None:
        self._worthless.pop(node, None)
        if self._is_waiting(node):
            # It goes on waiting in vain; only the number of such turns is bounded.
            self._holding[node.kind][node.age_class].pop(node, None)
            node.chain, node.left = (), 0
            self._ghosts[node] = None
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
                    node = next(iter(cell))
                    if self._now_s - node.at_s < EDGES_S[age + 1]:
                        break
                    self._move(node, kind, age, age_bin(self._now_s - node.at_s))

    def _move(self, node: RequestNode, kind: int, age: int, to: int) -> None:
        cells, since = self._waiting[kind], self._waiting_since[kind]
        del cells[age][node]
        cells[to][node] = None
        since[age] -= node.at_s
        since[to] += node.at_s
        self._rates.passed(kind, age, to)
        node.age_class = to
        if self._holding[kind][age].pop(node, node) is None:
            self._hold(node)

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


def _cells() -> list[list[dict[RequestNode, None]]]:
    return [[{} for _ in range(_AGES)] for _ in range(KINDS)]
