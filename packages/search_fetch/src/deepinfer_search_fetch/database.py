"""Files of the home folder that cannot be used are an error that names them."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from deepinfer_search_fetch.errors import SearchFetchError


@contextmanager
def readable(place: Path) -> Generator[None]:
    """Around the opening of a database or index: damage becomes SearchFetchError(unavailable)."""
    try:
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
