"""The ledger: one row per billable answer, written after its last byte was handed to the client.

A crash or a disconnect before that leaves no row: what may not have arrived is not charged. Money
is integer micro-units.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from deepinfer_search_fetch.errors import InvalidRequestError

Endpoint = Literal["search", "fetch"]
REPLAY_SECONDS = 24 * 3600
FREE_PAGING_SECONDS = 600
_SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger (
    request_id TEXT PRIMARY KEY, key_id TEXT NOT NULL, endpoint TEXT NOT NULL, ts REAL NOT NULL,
    quantity INTEGER NOT NULL, price_micros INTEGER NOT NULL, cache_hit INTEGER NOT NULL,
    bytes INTEGER NOT NULL, ms INTEGER NOT NULL, subject TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS ledger_key_ts ON ledger (key_id, ts);
CREATE TABLE IF NOT EXISTS replays (
    key_id TEXT NOT NULL, idempotency_key TEXT NOT NULL, body_hash TEXT NOT NULL,
    answer TEXT NOT NULL, ts REAL NOT NULL, PRIMARY KEY (key_id, idempotency_key)
);
"""


@dataclass(frozen=True, slots=True)
class Price:
    """Micro-units of `currency` per call, from `effective` (RFC 3339 day) on."""

    effective: str
    micros_per_call: int
    currency: str = "CNY"


# 5.00 CNY per 1,000 successful calls.
DEFAULT_PRICES: tuple[Price, ...] = (Price("1970-01-01", 5_000),)


@dataclass(frozen=True, slots=True)
class Charge:
    """A billable answer. subject: what it was about (for Fetch the content's id)."""

    request_id: str
    key_id: str
    endpoint: Endpoint
    quantity: int
    cache_hit: bool
    bytes: int
    ms: int
    subject: str


class Ledger:
    """Rows, idempotent replays and usage sums in one SQLite file (WAL)."""

    def __init__(
        self,
        file: Path,
        prices: tuple[Price, ...] = DEFAULT_PRICES,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._prices = sorted(prices, key=lambda p: p.effective)
        self._turn = threading.Lock()
        self._db = sqlite3.connect(file, timeout=10, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def price_at(self, timestamp: float) -> int:
        """Micro-units of one call at that time."""
        day = datetime.fromtimestamp(timestamp, UTC).date().isoformat()
        valid = [p for p in self._prices if p.effective <= day]
        return valid[-1].micros_per_call if valid else 0

    def record(self, charge: Charge) -> bool:
        """Write the row of an answer that was sent in full; False if this request has one."""
        now = self._clock()
        with self._turn:
            done = self._db.execute(
                "INSERT OR IGNORE INTO ledger VALUES (?,?,?,?,?,?,?,?,?,?)",
                (
                    charge.request_id,
                    charge.key_id,
                    charge.endpoint,
                    now,
                    charge.quantity,
                    charge.quantity * self.price_at(now),
                    int(charge.cache_hit),
                    charge.bytes,
                    charge.ms,
                    charge.subject,
                ),
            )
        return done.rowcount == 1

    def was_paid(self, key_id: str, subject: str) -> bool:
        """True if this key paid for the same content within the last ten minutes (free paging)."""
        with self._turn:
            row = self._db.execute(
                "SELECT 1 FROM ledger WHERE key_id = ? AND subject = ? AND ts > ? LIMIT 1",
                (key_id, subject, self._clock() - FREE_PAGING_SECONDS),
            ).fetchone()
        return row is not None

    def replay(self, key_id: str, idempotency_key: str, body: bytes) -> str | None:
        """The stored answer of the same call; raises InvalidRequestError(conflict) for another."""
        with self._turn:
            row = self._db.execute(
                "SELECT body_hash, answer FROM replays"
                " WHERE key_id = ? AND idempotency_key = ? AND ts > ?",
                (key_id, idempotency_key, self._clock() - REPLAY_SECONDS),
            ).fetchone()
        if row is None:
            return None
        if row[0] != hashlib.sha256(body).hexdigest():
            raise InvalidRequestError(
                "conflict", "this Idempotency-Key was used with another request body"
            )
        return row[1]

    def remember(self, key_id: str, idempotency_key: str, body: bytes, answer: str) -> None:
        """Keep an answer for replays of the same call."""
        with self._turn:
            self._db.execute(
                "INSERT OR REPLACE INTO replays VALUES (?,?,?,?,?)",
                (key_id, idempotency_key, hashlib.sha256(body).hexdigest(), answer, self._clock()),
            )

    def month_quantity(self, key_id: str) -> int:
        """Billable calls of a key since the first of this month (UTC)."""
        today = datetime.fromtimestamp(self._clock(), UTC)
        start = today.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
        with self._turn:
            row = self._db.execute(
                "SELECT COALESCE(SUM(quantity), 0) FROM ledger WHERE key_id = ? AND ts >= ?",
                (key_id, start),
            ).fetchone()
        return int(row[0])

    def usage(
        self, key_id: str | None = None, since: float = 0.0, until: float = 1e18
    ) -> list[dict[str, int | str]]:
        """Sums per key and endpoint; they equal the ledger's rows exactly."""
        with self._turn:
            rows = self._db.execute(
                "SELECT key_id, endpoint, COUNT(*), SUM(quantity), SUM(price_micros) FROM ledger"
                " WHERE ts >= ? AND ts < ? AND (? IS NULL OR key_id = ?)"
                " GROUP BY key_id, endpoint ORDER BY key_id, endpoint",
                (since, until, key_id, key_id),
            ).fetchall()
        names = ("key_id", "endpoint", "rows", "quantity", "price_micros")
        return [dict(zip(names, row, strict=True)) for row in rows]


def stable_json(value: object) -> bytes:
    """One spelling of a JSON value, for comparing request bodies."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
