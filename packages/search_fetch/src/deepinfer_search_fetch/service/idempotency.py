"""`Idempotency-Key`: the answer of a call is kept for a day and replayed for the same call.

What is kept includes the charges, so that an answer whose first delivery failed is charged when a
replay arrives, and never twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.service.metering import Charge, Ledger

REPLAY_SECONDS = 24 * 3600
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """JSON text of an answer and what it costs when it arrives."""

    text: str
    charges: tuple[Charge, ...]


def fingerprint(*parts: Any) -> str:
    """One digest for requests that mean the same."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


class Replays:
    """Answers by API key and idempotency key, beside the ledger's rows in the same file."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turns: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def turn(self, key_id: str, idempotency_key: str) -> AsyncGenerator[None]:
        """One request with a key at a time: a retry waits for the first and gets its answer.

        Raises InvalidRequestError for a key that is empty, too long or not printable ASCII.
        """
        if not (1 <= len(idempotency_key) <= MAX_KEY_CHARS and idempotency_key.isascii()):
            raise InvalidRequestError(
                "invalid_argument", f"Idempotency-Key must be 1..{MAX_KEY_CHARS} ASCII characters"
            )
        name = (key_id, idempotency_key)
        lock, waiting = self._turns.get(name, (asyncio.Lock(), 0))
        self._turns[name] = (lock, waiting + 1)
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._turns[name]
            if waiting == 1:
                del self._turns[name]
            else:
                self._turns[name] = (lock, waiting - 1)

    def find(self, key_id: str, idempotency_key: str, body: str) -> StoredAnswer | None:
        """The stored answer of the same call; InvalidRequestError(conflict) for another body.

        body: fingerprint of the request.
        """
        rows = self._ledger.read(
            "SELECT body_hash, answer, charges FROM replays"
            " WHERE key_id = ? AND idempotency_key = ? AND ts > ?",
            (key_id, idempotency_key, self._ledger.clock() - REPLAY_SECONDS),
        )
        if not rows:
            return None
        if rows[0][0] != body:
            raise InvalidRequestError(
                "conflict", "this Idempotency-Key was used with another request body"
            )
        return StoredAnswer(rows[0][1], tuple(Charge(**c) for c in json.loads(rows[0][2])))

    def keep(self, key_id: str, idempotency_key: str, body: str, answer: StoredAnswer) -> None:
        """Keep an answer, and drop those that are older than a day."""
        now = self._ledger.clock()
        charges = json.dumps([asdict(c) for c in answer.charges])
        self._ledger.write(
            ("DELETE FROM replays WHERE ts <= ?", (now - REPLAY_SECONDS,)),
            (
                "INSERT OR REPLACE INTO replays VALUES (?,?,?,?,?,?)",
                (key_id, idempotency_key, body, answer.text, charges, now),
            ),
        )
