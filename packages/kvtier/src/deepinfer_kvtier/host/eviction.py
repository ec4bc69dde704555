"""What host memory and the simulator ask of a policy that decides which block leaves.

A policy knows names only: in host memory they are digests of 32 bytes, in the simulator the ids of
the trace. Names of equal prefixes are equal, so the name of a block says everything before it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

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


_SLACK = 1 << 14
_AT_ONCE = 64
_PATIENCE = 4


class RequestNode:
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
        self.rest_of: RequestNode | None = None


class ChainBook:
    """Who owns which block, and which blocks are held. The order of eviction is the subclass's."""

    def __init__(self, *, remember: float, slack: int = _SLACK) -> None:
        """remember: names kept for each block held, that one included; `slack` more at any rate."""
        self._remember = remember
        self._slack = slack
        self._owner: dict[Name, RequestNode] = {}
        self._held: set[Name] = set()
        # Turns that own something, those used last at the end.
        self._line: dict[RequestNode, None] = {}
        # Turns that were found to be in use: not looked at again before the next request or put.
        self._aside: set[RequestNode] = set()

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

    def _owners(self, use: Use) -> tuple[list[RequestNode | None], int]:
        """Who owns each block of a chain, and how many leading ones have an owner."""
        owners = list(map(self._owner.get, use.chain))
        return owners, len(owners) if owners[-1] is not None else owners.index(None)

    def _claim(self, use: Use, owners: list[RequestNode | None]) -> RequestNode:
        """A new turn that owns the chain of a request."""
        self._aside.clear()
        node = RequestNode(use.chain, use.at_s)
        last = owners[-1]
        if last is not None and owners.count(last) == len(owners):
            self._disown(last, len(owners))
        else:
            for owner, count in Counter(owners).items():
                if owner is not None:
                    self._disown(owner, count)
        self._owner.update(dict.fromkeys(use.chain, node))
        self._line[node] = None
        return node

    def _disown(self, node: RequestNode, count: int) -> None:
        node.owned -= count
        if not node.owned:
            del self._line[node]
            self._emptied(node)

    def _adopt(self, name: Name, parent: Name, at_s: float) -> RequestNode:
        """A block that no request asked for continues the turn that owns the block before it."""
        node = self._owner.get(parent)
        if node is None:
            node = RequestNode([], at_s)
            self._line[node] = None
            self._begin(node)
        if not isinstance(node.chain, list):
            node.chain = list(node.chain)
        node.chain.append(name)
        node.left = len(node.chain)
        node.owned += 1
        self._owner[name] = node
        self._requeue(node)
        return node

    def _deepest(
        self, node: RequestNode, pinned: Callable[[Name], bool], patience: int | None = None
    ) -> Name | None:
        """The deepest block that a turn owns and holds, of those that are not pinned.

        patience: how many pinned ones to pass; a lease has them all. None = any number.
        """
        owner_of, held, chain = self._owner, self._held, node.chain
        at, passed = node.left, 0
        while at and passed != patience:
            at -= 1
            name = chain[at]
            if name not in held or owner_of.get(name) is not node:
                if at == node.left - 1:
                    node.left = at
            elif pinned(name):
                passed += 1
            else:
                return name
        return None

    def _first_of(
        self, nodes: dict[RequestNode, None], pinned: Callable[[Name], bool], patience: int | None
    ) -> Name | None:
        """A victim from the first turn that has one; turns that hold nothing leave `turns`."""
        found: Name | None = None
        empty: list[RequestNode] = []
        for node in nodes:
            if node in self._aside:
                continue
            found = self._deepest(node, pinned, patience)
            if found is not None:
                break
            if node.left:
                self._aside.add(node)
            else:
                empty.append(node)
        for node in empty:
            del nodes[node]
            self._unheld(node)
        return found

    def _forget_oldest(self) -> None:
        """Drop names of blocks that are gone, those used longest ago first."""
        limit = self._remember * len(self._held) + self._slack
        for _ in range(_AT_ONCE):
            if len(self._owner) <= limit:
                return
            node = next(iter(self._line))
            del self._line[node]
            if self._deepest(node, _nobody) is None:
                self._forget(node)
            else:
                self._line[node] = None

    def _forget(self, node: RequestNode) -> None:
        owner_of = self._owner
        for name in node.chain:
            if owner_of.get(name) is node:
                del owner_of[name]
        self._emptied(node)

    def _cheapest(self, pinned: Callable[[Name], bool], patience: int | None) -> Name | None:
        """The victim by the order of the policy, of turns that are not set aside."""
        raise NotImplementedError

    def _begin(self, node: RequestNode) -> None:
        """Blocks came that no request asked for."""

    def _requeue(self, node: RequestNode) -> None:
        """A turn may hold blocks (again)."""

    def _unheld(self, node: RequestNode) -> None:
        """A turn was found to hold nothing."""

    def _emptied(self, node: RequestNode) -> None:
        """A turn owns nothing any more."""


class TailLru(ChainBook):
    """Least recently used first, of blocks used together the deepest first."""

    def __init__(self) -> None:
        super().__init__(remember=2)

    def used(self, use: Use, /) -> None:
        if use.chain:
            self._claim(use, self._owners(use)[0])
            self._forget_oldest()

    def _cheapest(self, pinned: Callable[[Name], bool], patience: int | None) -> Name | None:
        return self._first_of(self._line, pinned, patience)

    def _unheld(self, node: RequestNode) -> None:
        self._forget(node)


def _nobody(name: Name) -> bool:
    return False


logger = logging.getLogger(__name__)


class Evictable(Protocol):
    """What the policy decides about. pins: above 0 it may not leave."""

    parent: bytes
    pins: int


class GuardedPolicy:
    """Drives a policy over records by digest; the first mistake puts tail-first LRU in its place.

    A mistake is an exception, a victim that is pinned or not there, or none although there is one.
    Called under the lock of host memory.
    """

    def __init__(self, policy: EvictionPolicy, records: Mapping[Any, Evictable]) -> None:
        self.policy = policy
        self._records = records
        self.failures = 0

    def used(self, use: Use) -> None:
        """A request asked for a chain of blocks."""
        try:
            self.policy.used(use)
        except Exception as cause:
            self._replace(cause)

    def entered(self, names: Sequence[bytes], parents: Sequence[bytes], at_s: float) -> None:
        """Records came to `records`."""
        try:
            self.policy.entered(names, parents, at_s)
        except Exception as cause:
            self._replace(cause)

    def left(self, name: bytes) -> None:
        """A record left `records`."""
        try:
            self.policy.left(name)
        except Exception as cause:
            self._replace(cause)

    def victim(self) -> Any:
        """Digest of the record that leaves next; None when all are pinned."""
        try:
            return self._checked(self.policy.victim(self._is_pinned))
        except Exception as cause:
            self._replace(cause)
            return self._checked(self.policy.victim(self._is_pinned))

    def _is_pinned(self, name: Name) -> bool:
        return self._records[name].pins > 0

    def _checked(self, name: Name | None) -> Name | None:
        if name is None:
            if any(not record.pins for record in self._records.values()):
                raise LookupError("named no victim although there is one")
        elif self._records[name].pins:
            raise LookupError("named a victim that is in use")
        return name

    def _replace(self, cause: Exception) -> None:
        logger.error(
            "the eviction policy %r failed, tail-first LRU takes its place: %r", self.policy, cause
        )
        self.failures += 1
        self.policy = TailLru()
        names = list(self._records)
        self.policy.entered(names, [self._records[name].parent for name in names], 0.0)
