"""The ledger: exactly one row per billable answer, in one SQLite file (WAL).

An answer is settled in three steps: `begin` commits its row, marked as on its way, when all but the
last byte is with the client's kernel; the last byte goes out; `finish` takes the mark off. A crash
in between leaves the mark, and `recover` at the next start removes such rows: what may not have
arrived is not charged. `void` does the same at once when the client left. Rows on their way count
like any other for readers, so a client that has its answer finds its row. Money is integer
micro-units; a commit survives the death of the process, a power cut may lose the last rows.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from deepinfer_search_fetch.database import LogKeeper, readable
from deepinfer_search_fetch.errors import InvalidRequestError, LimitError
from deepinfer_search_fetch.service.settings import DEFAULT_PRICES, Price, price_at

Endpoint = Literal["search", "fetch"]
GroupBy = Literal["key", "endpoint", "day", "month"]
GROUPS: tuple[GroupBy, ...] = ("key", "endpoint", "day", "month")
FREE_PAGING_SECONDS = 600
SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger (
    request_id TEXT PRIMARY KEY, key_id TEXT NOT NULL, endpoint TEXT NOT NULL, ts REAL NOT NULL,
    status INTEGER NOT NULL, quantity INTEGER NOT NULL, price_micros INTEGER NOT NULL,
    currency TEXT NOT NULL, cache_hit INTEGER NOT NULL, bytes INTEGER NOT NULL,
    ms INTEGER NOT NULL, subject TEXT NOT NULL, on_its_way INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS ledger_key_ts ON ledger (key_id, ts);
CREATE INDEX IF NOT EXISTS ledger_subject ON ledger (key_id, subject, ts);
CREATE INDEX IF NOT EXISTS ledger_on_its_way ON ledger (request_id) WHERE on_its_way = 1;
CREATE TABLE IF NOT EXISTS months (
    key_id TEXT NOT NULL, month TEXT NOT NULL, quantity INTEGER NOT NULL,
    PRIMARY KEY (key_id, month)
);
CREATE TABLE IF NOT EXISTS replays (
    key_id TEXT NOT NULL, idempotency_key TEXT NOT NULL, body_hash TEXT NOT NULL,
    answer TEXT NOT NULL, charges TEXT NOT NULL, ts REAL NOT NULL,
    PRIMARY KEY (key_id, idempotency_key)
);
CREATE INDEX IF NOT EXISTS replays_ts ON replays (ts);
"""
_COLUMNS: dict[str, str] = {
    "key": "key_id",
    "endpoint": "endpoint",
    "day": "strftime('%Y-%m-%d', ts, 'unixepoch')",
    "month": "strftime('%Y-%m', ts, 'unixepoch')",
}


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
    status: int = 200


class Ledger:
    """Rows, monthly totals for quotas, and sums. Safe to use from several threads."""

    def __init__(
        self,
        file: Path,
        prices: tuple[Price, ...] = DEFAULT_PRICES,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self._prices = prices
        self._turn = threading.Lock()
        self._reserved: dict[str, int] = {}
        self._db = sqlite3.connect(file, timeout=10, isolation_level=None, check_same_thread=False)
        with readable(file, self._db):
            self._db.execute("PRAGMA journal_mode=WAL")
            [(version,)] = self._db.execute("PRAGMA user_version").fetchall()
            tables = self._db.execute("SELECT 1 FROM sqlite_master WHERE name='ledger'").fetchall()
        if version != SCHEMA_VERSION and tables:
            self._db.close()
            raise InvalidRequestError(
                "invalid_argument",
                f"{file} is a ledger of format {version}, this version reads {SCHEMA_VERSION}; "
                "move the file away to begin a new one",
            )
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        self._keeper = LogKeeper(file, self._db, self._turn)

    def close(self) -> None:
        self._db.close()
        self._keeper.close()

    def read(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT."""
        with self._turn:
            return self._db.execute(statement, values).fetchall()

    def write(self, *work: tuple[str, Sequence[Any]]) -> list[int]:
        """Statements in one transaction; returns the number of rows each one changed."""
        with self._turn:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                counts = [self._db.execute(text, values).rowcount for text, values in work]
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._keeper.wrote()
        return counts

    def begin(self, charges: Iterable[Charge]) -> list[str]:
        """Write the rows of an answer, marked as on its way; returns the request ids of new rows.

        A request that has a row keeps it: settling an answer twice charges once.
        """
        now = self.clock()
        month = datetime.fromtimestamp(now, UTC).strftime("%Y-%m")
        written: list[str] = []
        with self._turn:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for charge in charges:
                    micros, currency = price_at(self._prices, charge.endpoint, now)
                    row = {
                        **asdict(charge),
                        "ts": now,
                        "price_micros": charge.quantity * micros,
                        "currency": currency,
                    }
                    done = self._db.execute(
                        "INSERT OR IGNORE INTO ledger VALUES (:request_id, :key_id, :endpoint, :ts,"
                        " :status, :quantity, :price_micros, :currency, :cache_hit, :bytes, :ms,"
                        " :subject, 1)",
                        row,
                    )
                    if done.rowcount == 1:
                        written.append(charge.request_id)
                        self._db.execute(
                            "INSERT INTO months VALUES (?,?,?) ON CONFLICT DO UPDATE"
                            " SET quantity = quantity + excluded.quantity",
                            (charge.key_id, month, charge.quantity),
                        )
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._keeper.wrote()
        return written

    def finish(self, request_ids: Iterable[str]) -> None:
        """The last byte is out: these rows stand."""
        self.write(
            *(("UPDATE ledger SET on_its_way = 0 WHERE request_id = ?", (i,)) for i in request_ids)
        )

    def void(self, request_ids: Iterable[str]) -> None:
        """The client left before the last byte: these answers are not billable."""
        for request_id in request_ids:
            self._remove("request_id = ?", (request_id,))

    def recover(self) -> int:
        """Remove what a crash left on its way; returns the number of rows.

        For the one process that writes this ledger, before it serves.
        """
        return self._remove("1 = 1", ())

    def _remove(self, which: str, values: Sequence[Any]) -> int:
        chosen = f"FROM ledger WHERE on_its_way = 1 AND {which}"
        return self.write(
            (
                "UPDATE months SET quantity = quantity - (SELECT COALESCE(SUM(l.quantity), 0)"  # nosec B608
                f" FROM (SELECT * {chosen}) l WHERE l.key_id = months.key_id"
                " AND strftime('%Y-%m', l.ts, 'unixepoch') = months.month)",
                values,
            ),
            (f"DELETE {chosen}", values),
        )[1]

    def record(self, charge: Charge) -> bool:
        """The row of an answer that arrived whole; False if this request has one already."""
        written = self.begin([charge])
        self.finish(written)
        return bool(written)

    def was_paid(self, key_id: str, subject: str) -> bool:
        """True if this key paid for the same content within the last ten minutes (free paging)."""
        return bool(
            self.read(
                "SELECT 1 FROM ledger WHERE key_id = ? AND subject = ? AND ts > ? LIMIT 1",
                (key_id, subject, self.clock() - FREE_PAGING_SECONDS),
            )
        )

    def has(self, request_id: str) -> bool:
        """Whether this request is charged already."""
        return bool(self.read("SELECT 1 FROM ledger WHERE request_id = ?", (request_id,)))

    def month_quantity(self, key_id: str) -> int:
        """Billable calls of a key since the first of this month (UTC)."""
        month = datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m")
        rows = self.read(
            "SELECT quantity FROM months WHERE key_id = ? AND month = ?", (key_id, month)
        )
        return int(rows[0][0]) if rows else 0

    def reserve(self, key_id: str, quantity: int, quota: int | None) -> None:
        """Hold room in a monthly quota for an answer on its way; pair it with `release`.

        Raises LimitError(insufficient_quota) when rows and reservations leave no room: concurrent
        requests cannot pass the quota together.
        """
        held = self._reserved.get(key_id, 0)
        if quota is not None and self.month_quantity(key_id) + held + quantity > quota:
            raise LimitError("insufficient_quota", "this key's monthly quota is used up")
        self._reserved[key_id] = held + quantity

    def release(self, key_id: str, quantity: int) -> None:
        """Give a reservation back, after its rows are written or the answer is void."""
        left = self._reserved.get(key_id, 0) - quantity
        if left > 0:
            self._reserved[key_id] = left
        else:
            self._reserved.pop(key_id, None)

    def usage(
        self,
        key_id: str | None = None,
        since: float = 0.0,
        until: float = 1e18,
        group_by: Sequence[GroupBy] = ("key", "endpoint"),
    ) -> list[dict[str, int | str]]:
        """Sums over rows with since <= ts < until; they equal the rows exactly.

        Grouped by the given columns and, since sums of money do not mix, by currency.
        """
        columns = [f"{_COLUMNS[g]} AS {_NAMES[g]}" for g in group_by] + ["currency"]
        places = ", ".join(str(i + 1) for i in range(len(columns)))
        rows = self.read(
            f"SELECT {', '.join(columns)}, COUNT(*), SUM(quantity), SUM(price_micros),"  # nosec B608
            " SUM(cache_hit), SUM(bytes) FROM ledger"
            " WHERE ts >= ? AND ts < ? AND (? IS NULL OR key_id = ?)"
            f" GROUP BY {places} ORDER BY {places}",
            (since, until, key_id, key_id),
        )
        names = (
            *(_NAMES[g] for g in group_by),
            *("currency", "rows", "quantity", "price_micros", "cache_hits", "bytes"),
        )
        return [dict(zip(names, row, strict=True)) for row in rows]


_NAMES: dict[str, str] = {"key": "key_id", "endpoint": "endpoint", "day": "day", "month": "month"}
