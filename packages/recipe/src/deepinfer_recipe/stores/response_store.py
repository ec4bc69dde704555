"""Where Responses answers are kept, so that the next request may go on from `previous_response_id`.

A store holds, for each answer, what was new in its request and the response. Answers form a chain
through `previous_id`; deleting one really deletes it, and answers that build on it can no longer
be continued. Everything belongs to an `owner` (an API key's id, say): nobody reads, continues or
deletes what is another's.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepinfer_recipe.base.json_text import compact_json


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer in a store.

    previous_id: the answer it continues; created: Unix time.
    input_items: the items that its own request brought, each with an id.
    """

    id: str
    previous_id: str | None
    created: int
    input_items: list[dict[str, Any]]
    response: dict[str, Any]

    def to_json(self) -> str:
        """Everything as JSON text."""
        return compact_json(
            {
                "id": self.id,
                "previous_id": self.previous_id,
                "created": self.created,
                "input_items": self.input_items,
                "response": self.response,
            }
        )

    @staticmethod
    def from_json(text: str) -> StoredResponse:
        """What `to_json` wrote."""
        return StoredResponse(**json.loads(text))


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much a store keeps, and how long.

    Beyond max_owner_responses or max_owner_bytes (of JSON text) the owner's own answers go, those
    that were not used for longest first. Beyond max_responses or max_bytes, the same happens to
    whoever holds most: nobody can push out the answers of an owner who holds less.
    max_age_s: since the last use; continuing an answer uses all those before it.
    """

    max_responses: int = 10_000
    max_bytes: int = 256 * 2**20
    max_owner_responses: int = 2_500
    max_owner_bytes: int = 64 * 2**20
    max_response_bytes: int = 8 * 2**20
    max_age_s: float = 30 * 86400

    @property
    def largest(self) -> int:
        """Bytes of the largest answer that can be kept."""
        return min(self.max_response_bytes, self.max_owner_bytes, self.max_bytes)

    def fills(self, responses: int, bytes: int) -> float:
        """How full so many answers of so many bytes make the whole store; over 1 is too full."""
        return max(responses / max(1, self.max_responses), bytes / max(1, self.max_bytes))

    def fills_owner(self, responses: int, bytes: int) -> float:
        """The same of one owner's share."""
        most, most_bytes = max(1, self.max_owner_responses), max(1, self.max_owner_bytes)
        return max(responses / most, bytes / most_bytes)


DEFAULT_STORE_LIMITS = StoreLimits()


class ResponseStore(Protocol):
    """What keeps answers. Methods may be called from any thread; they raise `StoreError`."""

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """The answer, if this owner has it."""
        ...

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Keep an answer; False if it is larger than one may be."""
        ...

    def delete(self, owner: str, id: str) -> bool:
        """Delete an answer; False if this owner has none of that id."""
        ...


@dataclass(slots=True)
class _Kept:
    text: str
    used: float
    size: int


@dataclass(slots=True)
class _Share:
    """What one owner has, the least recently used first."""

    kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict[str, _Kept])
    bytes: int = 0


class MemoryResponseStore:
    """Keeps answers in this process, as long as it runs."""

    def __init__(
        self,
        limits: StoreLimits = DEFAULT_STORE_LIMITS,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._shares: dict[str, _Share] = {}
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()
        """All of them, the least recently used first: what is too old stands in front."""
        self._bytes = 0

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """The answer, if this owner has it."""
        with self._lock:
            self._expire()
            share = self._shares.get(owner)
            kept = None if share is None else share.kept.get(id)
            if share is None or kept is None:
                return None
            kept.used = self._clock()
            share.kept.move_to_end(id)
            self._used.move_to_end((owner, id))
        return StoredResponse.from_json(kept.text)

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Keep an answer; False if it is larger than one may be."""
        text = response.to_json()
        size = len(text.encode())
        limits = self._limits
        if size > limits.largest:
            return False
        with self._lock:
            self._forget(owner, response.id)
            share = self._shares.setdefault(owner, _Share())
            share.kept[response.id] = _Kept(text, self._clock(), size)
            share.bytes += size
            self._used[owner, response.id] = None
            self._bytes += size
            self._expire()
            while limits.fills_owner(len(share.kept), share.bytes) > 1:
                self._forget(owner, next(iter(share.kept)))
            while limits.fills(len(self._used), self._bytes) > 1:
                largest = max(self._shares, key=self._fill)
                self._forget(largest, next(iter(self._shares[largest].kept)))
        return True

    def _fill(self, owner: str) -> float:
        share = self._shares[owner]
        return self._limits.fills(len(share.kept), share.bytes)

    def delete(self, owner: str, id: str) -> bool:
        """Delete an answer; False if this owner has none of that id."""
        with self._lock:
            self._expire()
            return self._forget(owner, id)

    def _forget(self, owner: str, id: str) -> bool:
        share = self._shares.get(owner)
        kept = None if share is None else share.kept.pop(id, None)
        if share is None or kept is None:
            return False
        del self._used[owner, id]
        share.bytes -= kept.size
        self._bytes -= kept.size
        if not share.kept:
            del self._shares[owner]
        return True

    def _expire(self) -> None:
        oldest = self._clock() - self._limits.max_age_s
        while self._used:
            owner, id = next(iter(self._used))
            if self._shares[owner].kept[id].used >= oldest:
                return
            self._forget(owner, id)

    def __len__(self) -> int:
        return len(self._used)
