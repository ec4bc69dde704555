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
from dataclasses import dataclass
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

    Beyond max_responses or max_bytes (of JSON text), what was not used for longest goes first.
    max_age_s: since the last use; continuing an answer uses all those before it.
    """

    max_responses: int = 10_000
    max_bytes: int = 256 * 2**20
    max_response_bytes: int = 8 * 2**20
    max_age_s: float = 30 * 86400


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
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        """The least recently used first."""
        self._bytes = 0

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """The answer, if this owner has it."""
        with self._lock:
            self._expire()
            kept = self._kept.get((owner, id))
            if kept is None:
                return None
            kept.used = self._clock()
            self._kept.move_to_end((owner, id))
        return StoredResponse.from_json(kept.text)

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Keep an answer; False if it is larger than one may be."""
        text = response.to_json()
        size = len(text.encode())
        limits = self._limits
        if size > min(limits.max_response_bytes, limits.max_bytes):
            return False
        with self._lock:
            self._forget((owner, response.id))
            self._kept[owner, response.id] = _Kept(text, self._clock(), size)
            self._bytes += size
            self._expire()
            while len(self._kept) > limits.max_responses or self._bytes > limits.max_bytes:
                self._forget(next(iter(self._kept)))
        return True

    def delete(self, owner: str, id: str) -> bool:
        """Delete an answer; False if this owner has none of that id."""
        with self._lock:
            self._expire()
            return self._forget((owner, id))

    def _forget(self, key: tuple[str, str]) -> bool:
        kept = self._kept.pop(key, None)
        if kept is None:
            return False
        self._bytes -= kept.size
        return True

    def _expire(self) -> None:
        oldest = self._clock() - self._limits.max_age_s
        while self._kept and next(iter(self._kept.values())).used < oldest:
            self._forget(next(iter(self._kept)))

    def __len__(self) -> int:
        return len(self._kept)
