"""The home folder: nobody else's to read, and errors that name the file that cannot be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from deepinfer_search_fetch.errors import SearchFetchError


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


@contextmanager
def _closed_on_failure(database: sqlite3.Connection | None) -> Generator[None]:
    try:
        yield
    except BaseException:
        if database is not None:
            database.close()
        raise
