"""The home folder: nobody else's to read, errors that name the file that cannot be used, and
databases that keep nobody waiting for the disk."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from deepinfer_search_fetch.errors import SearchFetchError

_COMMITS_IN_LOG = 250
_TRIES = 5
_MOST_LOG_BYTES = 64 * 1024 * 1024


def private_folder(folder: Path) -> Path:
    """Make the folder if it is missing, and keep other users of the machine out of it: it holds
    queries, pages and keys. Raises SearchFetchError(unavailable)."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise SearchFetchError(
            "unavailable",
            f"{folder} cannot be used as the home folder, which must be this user's own:"
            f" {error.strerror}",
            retryable=False,
        ) from None
    return folder


@contextmanager
def readable(place: Path, database: sqlite3.Connection | None = None) -> Generator[None]:
    """Around the opening of a database or index: damage becomes SearchFetchError(unavailable), and
    what was opened of it is closed."""
    try:
        with _closed_on_failure(database):
            yield
    except sqlite3.OperationalError as error:  # locked, read-only, not to be opened
        raise SearchFetchError("unavailable", f"{place} cannot be used: {error}") from None
    except (sqlite3.DatabaseError, ValueError, KeyError) as error:
        raise SearchFetchError(
            "unavailable",
            f"{place} is damaged or of another kind ({str(error)[:200]}); restore it, or move it "
            "away to begin a new one",
            retryable=False,
        ) from None


class LogKeeper:
    """Moves what commits left in a write-ahead log into its database, on a thread of its own.

    SQLite would do it in whichever commit finds the log long, and wait there for the disk: half a
    second on a busy one, in which the event loop stands still or nobody gets a page of the cache.
    Here the serving connection flushes nothing. The keeper's own flushes the log before it writes
    the database and the database before the log is cut, so that a power cut costs the last rows and
    neither order nor integrity.
    """

    def __init__(
        self, file: Path, database: sqlite3.Connection, turn: AbstractContextManager[Any]
    ) -> None:
        """database: the connection that serves, in journal mode WAL. turn: held by whoever uses
        it."""
        database.execute("PRAGMA wal_autocheckpoint=0")
        database.execute("PRAGMA synchronous=OFF")
        self._log = file.with_name(f"{file.name}-wal")
        self._turn = turn
        self._db = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA synchronous=FULL")
        self._threads = ThreadPoolExecutor(1, "search-fetch-log-keeper")
        self._at_work: Future[None] | None = None
        self._commits = self._moved = 0

    def wrote(self) -> None:
        """After each commit, in the same turn."""
        self._commits += 1
        idle = self._at_work is None or self._at_work.done()
        if idle and self._commits - self._moved >= _COMMITS_IN_LOG:
            self._moved = self._commits
            self._at_work = self._threads.submit(self.move)

    def move(self) -> None:
        """Bring the log into the database; cut it if nothing was written meanwhile."""
        for _ in range(_TRIES):
            with self._turn:
                before = self._commits
            with suppress(sqlite3.OperationalError):  # another process does it just now
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            with self._turn:
                # Then there is nothing left to flush, and the turn is short.
                if self._commits == before or self._size() > _MOST_LOG_BYTES:
                    with suppress(sqlite3.OperationalError):
                        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                    break
        # What lies in the log from now on must never meet what lay there before.
        with suppress(OSError):
            log = os.open(self._log, os.O_RDONLY)
            try:
                os.fsync(log)
            finally:
                os.close(log)

    def close(self) -> None:
        """After the serving connection: the last one to close empties the log."""
        self._threads.shutdown(cancel_futures=True)
        self._db.close()

    def _size(self) -> int:
        with suppress(OSError):
            return self._log.stat().st_size
        return 0


@contextmanager
def _closed_on_failure(database: sqlite3.Connection | None) -> Generator[None]:
    try:
        yield
    except BaseException:
        if database is not None:
            database.close()
        raise
