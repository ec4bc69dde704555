"""A store of responses in one SQLite file: it outlives the process and may be shared by several."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from deepinfer_recipe.base.errors import StoreError
from deepinfer_recipe.stores.response_store import DEFAULT_STORE_LIMITS, StoredResponse, StoreLimits

_VERSION = 2
_SCHEMA = f"""
CREATE TABLE responses (
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    used REAL NOT NULL,
    bytes INTEGER NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE INDEX responses_by_use ON responses (used, bytes);
CREATE INDEX responses_by_owner ON responses (owner, used, bytes);
PRAGMA user_version = {_VERSION};
"""


class SqliteResponseStore:
    """Keeps answers in a file that only its owner on this machine can read.

    What is deleted, or grew too old, is overwritten in the file and in its write-ahead log. Close
    the store when done with it, or use it as a context manager.

    Raises `StoreError` for a file that is not such a store, and when it cannot be read or
    written.
    """

    def __init__(
        self,
        path: str | Path,
        limits: StoreLimits = DEFAULT_STORE_LIMITS,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # Absolute, so that no name means anything special to SQLite.
        self._path = Path(path).absolute()
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        with self._told():
            # Made before SQLite opens it: from the first byte on nobody else may read it.
            opened = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(opened, 0o600)  # one that was there may be readable for others
            finally:
                os.close(opened)
            self._db = sqlite3.connect(
                self._path, timeout=10, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA secure_delete = ON")
        with self._transaction():
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            [tables] = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
            elif version == 1 and tables:
                self._db.execute(
                    "CREATE INDEX responses_by_owner ON responses (owner, used, bytes)"
                )
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise StoreError(
                    f"{self._path} is no store of responses of version {_VERSION}; give a new path"
                )

    @contextmanager
    def _told(self) -> Generator[None, None, None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError) as error:
            raise StoreError(f"the store of responses {self._path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """The answer, if this owner has it."""
        now = self._clock()
        with self._lock, self._told(), self._transaction():
            row = self._db.execute(
                "SELECT data FROM responses WHERE owner = ? AND id = ? AND used >= ?",
                (owner, id, now - self._limits.max_age_s),
            ).fetchone()
            if row is None:
                return None
            self._db.execute(
                "UPDATE responses SET used = ? WHERE owner = ? AND id = ?", (now, owner, id)
            )
            return StoredResponse.from_json(row[0])

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Keep an answer; False if it is larger than one may be."""
        text = response.to_json()
        size = len(text.encode())
        limits = self._limits
        if size > limits.largest:
            return False
        now = self._clock()
        with self._lock, self._told():
            with self._transaction():
                self._db.execute(
                    "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)",
                    (owner, response.id, now, size, text),
                )
                expired = self._db.execute(
                    "DELETE FROM responses WHERE used < ?", (now - limits.max_age_s,)
                ).rowcount
                self._shrink(owner)
            if expired:
                self._empty_log()
        return True

    def _shrink(self, owner: str) -> None:
        """Make room: in this owner's share first, then where most is held."""
        limits = self._limits
        count, total = self._totals("WHERE owner = ?", owner)
        self._drop_oldest(owner, count, total, limits.fills_owner)
        count, total = self._totals("")
        if limits.fills(count, total) <= 1:
            return
        shares = self._db.execute(
            "SELECT owner, count(*), sum(bytes) FROM responses GROUP BY owner"
        ).fetchall()
        while limits.fills(count, total) > 1:
            largest = max(range(len(shares)), key=lambda i: limits.fills(*shares[i][1:]))
            name, held, held_bytes = shares[largest]
            [rowid, size] = self._db.execute(
                "SELECT rowid, bytes FROM responses WHERE owner = ? ORDER BY used, rowid LIMIT 1",
                (name,),
            ).fetchone()
            self._db.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
            shares[largest] = (name, held - 1, held_bytes - size)
            count, total = count - 1, total - size

    def _totals(self, where: str, *values: str) -> tuple[int, int]:
        # `where` is a text of this module
        query = f"SELECT count(*), coalesce(sum(bytes), 0) FROM responses {where}"  # nosec B608
        count, total = self._db.execute(query, values).fetchone()
        return count, total

    def _drop_oldest(
        self, owner: str, count: int, total: int, fills: Callable[[int, int], float]
    ) -> None:
        if fills(count, total) <= 1:
            return
        gone: list[tuple[int]] = []
        for rowid, size in self._db.execute(
            "SELECT rowid, bytes FROM responses WHERE owner = ? ORDER BY used, rowid", (owner,)
        ):
            if fills(count, total) <= 1:
                break
            gone.append((rowid,))
            count, total = count - 1, total - size
        self._db.executemany("DELETE FROM responses WHERE rowid = ?", gone)

    def _empty_log(self) -> None:
        """Write the log into the file and cut it to nothing: what was deleted is in neither."""
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise StoreError(
                f"the store of responses {self._path}: deleted, but another process reads and "
                "keeps the write-ahead log; delete again when it is done"
            )

    def delete(self, owner: str, id: str) -> bool:
        """Delete an answer; False if this owner has none of that id.

        When this returns, neither the file nor its write-ahead log holds the answer.
        """
        oldest = self._clock() - self._limits.max_age_s
        with self._lock, self._told():
            with self._transaction():
                found = self._db.execute(
                    "DELETE FROM responses WHERE owner = ? AND id = ? RETURNING used", (owner, id)
                ).fetchone()
            self._empty_log()
        return found is not None and found[0] >= oldest

    def __len__(self) -> int:
        with self._lock, self._told():
            return self._db.execute("SELECT count(*) FROM responses").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Not there if opening the file failed.
        if hasattr(self, "_db"):
            self._db.close()
