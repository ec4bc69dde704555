"""API keys: only a hash is stored, the key itself is shown once."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from deepinfer_search_fetch.database import readable
from deepinfer_search_fetch.errors import InvalidRequestError, RefusedError

SCOPES = ("search", "fetch", "ingest", "admin")
_PREFIX_CHARS = 11
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, prefix TEXT NOT NULL, hash TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
    scopes TEXT NOT NULL, created REAL NOT NULL, revoked REAL, monthly_quota INTEGER
);
"""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """id and prefix may be shown; monthly_quota counts billable calls, None for no limit."""

    id: str
    prefix: str
    name: str
    scopes: frozenset[str]
    monthly_quota: int | None = None

    def require(self, scope: str) -> None:
        if scope not in self.scopes and "admin" not in self.scopes:
            raise RefusedError("forbidden", f"this key lacks the scope {scope!r}")


ANONYMOUS = ApiKey("anonymous", "", "anonymous", frozenset(SCOPES))


class KeyStore:
    """Keys in one SQLite file; safe to use from several threads."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._turn = threading.Lock()
        self._db = sqlite3.connect(file, timeout=10, isolation_level=None, check_same_thread=False)
        with readable(file, self._db):
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def create(
        self,
        name: str,
        scopes: Iterable[str] = ("search", "fetch"),
        monthly_quota: int | None = None,
    ) -> tuple[str, ApiKey]:
        """A new key: (the secret, shown this once, and its record)."""
        wanted = frozenset(scopes)
        if not wanted or not wanted <= set(SCOPES):
            raise InvalidRequestError(
                "invalid_argument", f"scopes must be of {', '.join(SCOPES)}; got {sorted(wanted)}"
            )
        secret = "sk-" + secrets.token_urlsafe(32)
        key = ApiKey(
            f"key_{secrets.token_hex(8)}", secret[:_PREFIX_CHARS], name, wanted, monthly_quota
        )
        with self._turn:
            self._db.execute(
                "INSERT INTO keys VALUES (?,?,?,?,?,?,NULL,?)",
                (
                    key.id,
                    key.prefix,
                    _hash(secret),
                    name,
                    ",".join(sorted(wanted)),
                    self._clock(),
                    monthly_quota,
                ),
            )
        return secret, key

    def find(self, secret: str) -> ApiKey:
        """The live key of that secret. Raises RefusedError(unauthorized)."""
        digest = _hash(secret)
        with self._turn:
            row = self._db.execute(
                "SELECT id, prefix, name, scopes, monthly_quota, hash FROM keys"
                " WHERE prefix = ? AND hash = ? AND revoked IS NULL",
                (secret[:_PREFIX_CHARS], digest),
            ).fetchone()
        if row is None or not hmac.compare_digest(row[5], digest):
            raise RefusedError("unauthorized", "unknown or revoked API key")
        return ApiKey(row[0], row[1], row[2], frozenset(row[3].split(",")), row[4])

    def revoke(self, key_id: str) -> bool:
        """True if a live key of that id was revoked."""
        with self._turn:
            done = self._db.execute(
                "UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL",
                (self._clock(), key_id),
            )
        return done.rowcount == 1

    def all(self) -> list[ApiKey]:
        """Live keys, oldest first."""
        with self._turn:
            rows = self._db.execute(
                "SELECT id, prefix, name, scopes, monthly_quota FROM keys"
                " WHERE revoked IS NULL ORDER BY created, id"
            ).fetchall()
        return [ApiKey(r[0], r[1], r[2], frozenset(r[3].split(",")), r[4]) for r in rows]


def _hash(secret: str) -> str:
    # A key is 256 random bits: a plain hash cannot be searched, no slow password hash is needed.
    return hashlib.sha256(secret.encode()).hexdigest()
