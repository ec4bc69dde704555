"""Raw responses on disk: an SQLite index and content-addressed zstd blobs, least recent out first.

Safe across processes: blobs are written to a temporary name and renamed, rows in transactions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import zstandard

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.database import LogKeeper, readable
from deepinfer_search_fetch.errors import SearchFetchError, UpstreamError
from deepinfer_search_fetch.models import RedirectHop
from deepinfer_search_fetch.net.chain import Page
from deepinfer_search_fetch.net.robots import robots_directives
from deepinfer_search_fetch.net.transport import Response

MAX_TTL_SECONDS = 7 * 24 * 3600
DEFAULT_TTL_SECONDS = 24 * 3600
STALE_IF_ERROR_SECONDS = 24 * 3600
MISSING_SECONDS = 600.0
DNS_FAILURE_SECONDS = 60.0
_MAX_FAILURES = 10_000
_MAX_BLOB = 128 * 1024 * 1024
_DIGITS = re.compile(r"[0-9]+")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    key TEXT PRIMARY KEY, requested TEXT NOT NULL, final TEXT NOT NULL, status INTEGER NOT NULL,
    headers TEXT NOT NULL, hops TEXT NOT NULL, blob TEXT NOT NULL, bytes INTEGER NOT NULL,
    stored REAL NOT NULL, expires REAL NOT NULL, used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
CREATE TABLE IF NOT EXISTS failures (
    key TEXT PRIMARY KEY, code TEXT NOT NULL, message TEXT NOT NULL, status INTEGER NOT NULL,
    details TEXT NOT NULL, until REAL NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A stored page; `stored` and `expires` are seconds since the epoch."""

    page: Page
    stored: float
    expires: float

    @property
    def etag(self) -> str | None:
        return self.page.response.header("etag")

    def validators(self) -> list[tuple[str, str]]:
        """Conditional request headers, empty if the page gave no validator."""
        headers: list[tuple[str, str]] = []
        if self.etag:
            headers.append(("If-None-Match", self.etag))
        modified = self.page.response.header("last-modified")
        if modified:
            headers.append(("If-Modified-Since", modified))
        return headers


class PageCache:
    """`get`, `put` and `refresh` by key; safe to use from several threads."""

    def __init__(
        self, folder: Path, max_bytes: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._blobs = folder / "blobs"
        self._max_bytes = max_bytes
        self._clock = clock
        self._turn = threading.RLock()  # one connection, several threads
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(
            folder / "index.sqlite3", timeout=10, isolation_level=None, check_same_thread=False
        )
        with readable(folder / "index.sqlite3", self._db):
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)
            self._keeper = LogKeeper(folder / "index.sqlite3", self._db, self._turn)

    def close(self) -> None:
        with self._turn:
            self._db.close()
        self._keeper.close()

    @staticmethod
    def key(url: urls.Url, accept_language: str | None, rendering: str = "") -> str:
        """rendering: "" for the page as sent, else how a browser was asked to draw it."""
        text = f"{url.without_fragment()}\n{accept_language or ''}\n{rendering}"
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    def get(self, key: str) -> CacheEntry | None:
        """The entry, fresh or not; None if unknown or its blob is gone or damaged."""
        rows = self._rows(
            "SELECT requested, final, status, headers, hops, blob, bytes, stored, expires"
            " FROM responses WHERE key = ?",
            key,
        )
        if not rows:
            return None
        requested, final, status, headers, hops, blob, size, stored, expires = rows[0]
        body = self._read_blob(blob)
        if body is None:
            self._rows("DELETE FROM responses WHERE key = ?", key)
            return None
        self._rows("UPDATE responses SET used = ? WHERE key = ?", self._clock(), key)
        response = Response(
            urls.parse(final),
            status,
            tuple((k, v) for k, v in json.loads(headers)),
            body,
            size,
            digest=blob,
        )
        chain = tuple(RedirectHop.model_validate(h) for h in json.loads(hops))
        return CacheEntry(Page(urls.parse(requested), response, chain), stored, expires)

    def put(self, key: str, page: Page, max_age: float) -> CacheEntry | None:
        """Store a page for at most `max_age` seconds; None if the response forbids storing."""
        response = page.response
        if not storable(response):
            return None
        now = self._clock()
        ttl = min(max_age, MAX_TTL_SECONDS, freshness_seconds(response, now))
        blob = response.digest or hashlib.sha256(response.body).hexdigest()
        compressed = zstandard.ZstdCompressor(level=3).compress(response.body)
        if self._max_bytes and len(compressed) > self._max_bytes // 4:
            return None
        with self._turn:
            self._write_blob(blob, compressed)
            self._rows("DELETE FROM failures WHERE key = ?", key)
            self._rows(
                "INSERT OR REPLACE INTO responses VALUES (?,?,?,?,?,?,?,?,?,?,?)",
                key,
                str(page.requested),
                str(response.url),
                response.status,
                json.dumps(response.headers),
                json.dumps([h.model_dump(by_alias=True) for h in page.hops]),
                blob,
                len(compressed),
                now,
                now + ttl,
                now,
            )
            self._evict()
        return CacheEntry(page, now, now + ttl)

    def remove(self, key: str) -> None:
        """Forget a page, for example because its own text forbids keeping it."""
        with self._turn:
            for row in self._rows("SELECT blob FROM responses WHERE key = ?", key):
                self._drop(key, row[0])

    def remember_failure(self, key: str, error: SearchFetchError) -> None:
        """Keep a missing page for 10 minutes and an unresolvable name for one; others not."""
        missing = error.code == "upstream_http" and error.http_status == 404
        seconds = MISSING_SECONDS if missing else DNS_FAILURE_SECONDS
        if not missing and error.code != "dns_failure":
            return
        now = self._clock()
        told = (error.code, error.message, error.http_status, json.dumps(error.details))
        self._rows(
            "INSERT OR REPLACE INTO failures VALUES (?,?,?,?,?,?)", key, *told, now + seconds
        )
        self._rows(
            "DELETE FROM failures WHERE until < ? OR key IN"
            " (SELECT key FROM failures ORDER BY until DESC LIMIT -1 OFFSET ?)",
            now,
            _MAX_FAILURES,
        )

    def failure(self, key: str) -> UpstreamError | None:
        """The failure remembered for `key`, if it still holds; marked `cached` in its details."""
        rows = self._rows(
            "SELECT code, message, status, details FROM failures WHERE key = ? AND until > ?",
            key,
            self._clock(),
        )
        if not rows:
            return None
        code, message, status, details = rows[0]
        return UpstreamError(
            code, message, http_status=status, details={**json.loads(details), "cached": True}
        )

    def refresh(self, key: str, entry: CacheEntry, answer: Response, max_age: float) -> CacheEntry:
        """A 304 arrived: the stored page is fresh again, for as long as the 304 says."""
        now = self._clock()
        speaks = answer.header("cache-control") or answer.header("expires")
        fresh = freshness_seconds(answer if speaks else entry.page.response, now)
        ttl = min(max_age, MAX_TTL_SECONDS, fresh)
        self._rows(
            "UPDATE responses SET stored = ?, expires = ?, used = ? WHERE key = ?",
            now,
            now + ttl,
            now,
            key,
        )
        return CacheEntry(entry.page, now, now + ttl)

    def _evict(self) -> None:
        [(total,)] = self._rows("SELECT COALESCE(SUM(bytes), 0) FROM responses")
        while total > self._max_bytes:
            rows = self._rows("SELECT key, blob, bytes FROM responses ORDER BY used LIMIT 1")
            if not rows:
                return
            self._drop(rows[0][0], rows[0][1])
            total -= rows[0][2]

    def _drop(self, key: str, blob: str) -> None:
        self._rows("DELETE FROM responses WHERE key = ?", key)
        if not self._rows("SELECT 1 FROM responses WHERE blob = ? LIMIT 1", blob):
            self._blob_path(blob).unlink(missing_ok=True)

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        with self._turn:
            rows = self._db.execute(sql, values).fetchall()
            if not sql.startswith("SELECT"):
                self._keeper.wrote()
            return rows

    def _blob_path(self, name: str) -> Path:
        return self._blobs / name[:2] / name

    def _write_blob(self, name: str, compressed: bytes) -> None:
        path = self._blob_path(name)
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        temporary.write_bytes(compressed)
        temporary.replace(path)

    def _read_blob(self, name: str) -> bytes | None:
        """The body, or None when the blob is missing, truncated or not what its name says."""
        try:
            raw = self._blob_path(name).read_bytes()
            body = zstandard.ZstdDecompressor().decompress(raw, max_output_size=_MAX_BLOB)
        except (OSError, zstandard.ZstdError):
            return None
        return body if hashlib.sha256(body).hexdigest() == name else None


def storable(response: Response) -> bool:
    """Only complete, public 200 pages without cookies or noarchive enter the shared cache."""
    control = (response.header("cache-control") or "").lower()
    return (
        response.status == 200
        and "no-store" not in control
        and "private" not in control
        and response.header("set-cookie") is None
        and response.header("vary") != "*"
        and "noarchive" not in robots_directives(response.headers)
    )


def delta_seconds(text: str) -> int | None:
    """Whole seconds of a header value (RFC 9111 section 1.2.2), capped; None if it is none."""
    if not _DIGITS.fullmatch(text):
        return None
    return int(text) if len(text) <= 10 else 2**31


def freshness_seconds(response: Response, now: float) -> float:
    """How long HTTP says the response stays fresh; a day where it says nothing."""
    directives = {
        part.partition("=")[0].strip().lower(): part.partition("=")[2].strip('" ')
        for part in (response.header("cache-control") or "").split(",")
    }
    if "no-cache" in directives:
        return 0.0
    for name in ("s-maxage", "max-age"):
        seconds = delta_seconds(directives.get(name, ""))
        if seconds is not None:
            return float(min(seconds, MAX_TTL_SECONDS))
    expires = response.header("expires")
    if expires:
        try:
            when = parsedate_to_datetime(expires)
        except (TypeError, ValueError, OverflowError):
            return 0.0
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0.0, (when - datetime.fromtimestamp(now, UTC)).total_seconds())
    return DEFAULT_TTL_SECONDS
