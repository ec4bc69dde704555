"""A store of responses in one SQLite file: it outlives the process and may be shared by several."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from deepinfer_recipe.base.errors import StoreError
from deepinfer_recipe.stores.response_store import DEFAULT_STORE_LIMITS, StoredResponse, StoreLimits

_VERSION = 1
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
PRAGMA user_version = {_VERSION};
"""


class SqliteResponseStore:
    """Keeps answers in a file that only its owner on this machine can read.

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
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                self._path, timeout=10, isolation_level=None, check_same_thread=False
            )
            self._prepare()

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self._transaction():
            [version] = self._db.execute("PRAGMA user_version").fetchone()
            [tables] = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and tables == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
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
        if size > min(limits.max_response_bytes, limits.max_bytes):
            return False
        now = self._clock()
        with self._lock, self._told(), self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?)",
                (owner, response.id, now, size, text),
            )
            self._db.execute("DELETE FROM responses WHERE used < ?", (now - limits.max_age_s,))
            self._shrink()
        return True

    def _shrink(self) -> None:
        count, total = self._db.execute("SELECT count(*), sum(bytes) FROM responses").fetchone()
        if count <= self._limits.max_responses and total <= self._limits.max_bytes:
            return
        oldest = self._db.execute("SELECT rowid, bytes FROM responses ORDER BY used, rowid")
        gone: list[tuple[int]] = []
        for rowid, size in oldest:
            if count <= self._limits.max_responses and total <= self._limits.max_bytes:
                break
            gone.append((rowid,))
            count -= 1
            total -= size
        self._db.executemany("DELETE FROM responses WHERE rowid = ?", gone)

    def delete(self, owner: str, id: str) -> bool:
        """Delete an answer; False if this owner has none of that id."""
        oldest = self._clock() - self._limits.max_age_s
        with self._lock, self._told(), self._transaction():
            found = self._db.execute(
                "DELETE FROM responses WHERE owner = ? AND id = ? RETURNING used", (owner, id)
            ).fetchone()
        return found is not None and found[0] >= oldest

    def __len__(self) -> int:
        with self._lock, self._told():
            return self._db.execute("SELECT count(*) FROM responses").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
