"""Blocks by the request that used them last: the books behind `tail-lru` and `session`.

A request uses a chain of blocks from the root on. Whoever used a block last owns it, so a request
takes a prefix away from its predecessors, and what each of them still owns is one run of its chain.
Deciding between requests and taking the deepest block of one costs nothing for each block used
but two dictionary operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from deepinfer_kvtier.memory.eviction import Name, Use

_SLACK = 1 << 14
_AT_ONCE = 64
_PATIENCE = 4


class Turn:
    """One request, or blocks that came without one.

    chain:  its blocks, first to last, those it no longer owns included.
    owned:  how many of them no later turn has used, held or not.
    depth:  how many earlier turns of the same conversation there were.
    left:   blocks of `chain` from here on are not held; what comes back sets it anew.
    rest_of: for a last block that is kept apart, the turn it belongs to.
    """

    __slots__ = ("age_class", "at_s", "chain", "depth", "kind", "left", "owned", "rest_of")

    def __init__(self, chain: Sequence[Name], at_s: float) -> None:
        self.chain = chain
        self.at_s = at_s
        self.owned = self.left = len(chain)
        self.kind = self.depth = self.age_class = 0
        self.rest_of: Turn | None = None


class TurnBook:
    """Who owns which block, and which blocks are held. The order of eviction is the subclass's."""

    def __init__(self, *, remember: float, slack: int = _SLACK) -> None:
        """remember: names kept for each block held, that one included; `slack` more at any rate."""
        self._remember = remember
        self._slack = slack
        self._owner: dict[Name, Turn] = {}
        self._held: set[Name] = set()
        # Turns that own something, those used last at the end.
        self._line: dict[Turn, None] = {}
        # Turns that were found to be in use: not looked at again before the next request or put.
        self._aside: set[Turn] = set()

    @property
    def remembered(self) -> int:
        """Blocks whose last use is known, held or not."""
        return len(self._owner)

    def entered(self, names: Sequence[Name], parents: Sequence[Name], at_s: float, /) -> None:
        if not names:
            return
        self._aside.clear()
        owner_of = self._owner
        self._held.update(names)
        first = owner_of.get(names[0])
        if first is not None and first.left == len(first.chain):
            owners = list(map(owner_of.get, names))
            if owners.count(first) == len(owners):
                return  # a request asked for them just before
        for name, parent in zip(names, parents, strict=True):
            owner = owner_of.get(name)
            if owner is None:
                owner = self._adopt(name, parent, at_s)
            elif owner.left < len(owner.chain):
                owner.left = len(owner.chain)
                self._requeue(owner)

    def left(self, name: Name, /) -> None:
        self._held.discard(name)

    def victim(self, pinned: Callable[[Name], bool], /) -> Name | None:
        found = self._cheapest(pinned, _PATIENCE)
        if found is None and self._aside:
            self._aside.clear()
            found = self._cheapest(pinned, None)
        return found

    def _owners(self, use: Use) -> tuple[list[Turn | None], int]:
        """Who owns each block of a chain, and how many leading ones somebody does."""
        owners = list(map(self._owner.get, use.chain))
        return owners, len(owners) if owners[-1] is not None else owners.index(None)

    def _claim(self, use: Use, owners: list[Turn | None]) -> Turn:
        """A new turn that owns the chain of a request."""
        self._aside.clear()
        turn = Turn(use.chain, use.at_s)
        last = owners[-1]
        if last is not None and owners.count(last) == len(owners):
            self._disown(last, len(owners))
        else:
            for owner, count in Counter(owners).items():
                if owner is not None:
                    self._disown(owner, count)
        self._owner.update(dict.fromkeys(use.chain, turn))
        self._line[turn] = None
        return turn

    def _disown(self, turn: Turn, count: int) -> None:
        turn.owned -= count
        if not turn.owned:
            del self._line[turn]
            self._emptied(turn)

    def _adopt(self, name: Name, parent: Name, at_s: float) -> Turn:
        """A block that no request asked for continues the turn that owns the block before it."""
        turn = self._owner.get(parent)
        if turn is None:
            turn = Turn([], at_s)
            self._line[turn] = None
            self._begin(turn)
        if not isinstance(turn.chain, list):
            turn.chain = list(turn.chain)
        turn.chain.append(name)
        turn.left = len(turn.chain)
        turn.owned += 1
        self._owner[name] = turn
        self._requeue(turn)
        return turn

    def _deepest(
        self, turn: Turn, pinned: Callable[[Name], bool], patience: int | None = None
    ) -> Name | None:
        """The deepest block that a turn owns and holds, of those that are not pinned.

        patience: how many pinned ones to pass; a lease has them all. None = any number.
        """
        owner_of, held, chain = self._owner, self._held, turn.chain
        at, passed = turn.left, 0
        while at and passed != patience:
            at -= 1
            name = chain[at]
            if name not in held or owner_of.get(name) is not turn:
                if at == turn.left - 1:
                    turn.left = at
            elif pinned(name):
                passed += 1
            else:
                return name
        return None

    def _first_of(
        self, turns: dict[Turn, None], pinned: Callable[[Name], bool], patience: int | None
    ) -> Name | None:
        """A victim from the first turn that has one; turns that hold nothing leave `turns`."""
        found: Name | None = None
        empty: list[Turn] = []
        for turn in turns:
            if turn in self._aside:
                continue
            found = self._deepest(turn, pinned, patience)
            if found is not None:
                break
            if turn.left:
                self._aside.add(turn)
            else:
                empty.append(turn)
        for turn in empty:
            del turns[turn]
            self._unheld(turn)
        return found

    def _forget_oldest(self) -> None:
        """Drop names of blocks that are gone, those used longest ago first."""
        limit = self._remember * len(self._held) + self._slack
        for _ in range(_AT_ONCE):
            if len(self._owner) <= limit:
                return
            turn = next(iter(self._line))
            del self._line[turn]
            if self._deepest(turn, _nobody) is None:
                self._forget(turn)
            else:
                self._line[turn] = None

    def _forget(self, turn: Turn) -> None:
        owner_of = self._owner
        for name in turn.chain:
            if owner_of.get(name) is turn:
                del owner_of[name]
        self._emptied(turn)

    def _cheapest(self, pinned: Callable[[Name], bool], patience: int | None) -> Name | None:
        """The victim by the order of the policy, of turns that are not set aside."""
        raise NotImplementedError

    def _begin(self, turn: Turn) -> None:
        """Blocks came that no request asked for."""

    def _requeue(self, turn: Turn) -> None:
        """A turn may hold blocks (again)."""

    def _unheld(self, turn: Turn) -> None:
        """A turn was found to hold nothing."""

    def _emptied(self, turn: Turn) -> None:
        """A turn owns nothing any more."""


class TailLru(TurnBook):
    """Least recently used first, of blocks used together the deepest first."""

    def __init__(self) -> None:
        super().__init__(remember=2)

    def used(self, use: Use, /) -> None:
        if use.chain:
            self._claim(use, self._owners(use)[0])
            self._forget_oldest()

    def _cheapest(self, pinned: Callable[[Name], bool], patience: int | None) -> Name | None:
        return self._first_of(self._line, pinned, patience)

    def _unheld(self, turn: Turn) -> None:
        self._forget(turn)


def _nobody(name: Name) -> bool:
    return False
