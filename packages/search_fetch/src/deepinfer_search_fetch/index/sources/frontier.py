"""The crawl's list of URLs, in SQLite, so that a crawl that was killed goes on where it was.

A URL is marked done in the same transaction that adds the links found on it, and only after the
index holds its page. What was not marked is read again; that finds the page unchanged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_search_fetch.database import readable

_SCHEMA = """
CREATE TABLE IF NOT EXISTS urls (
  url TEXT PRIMARY KEY, node TEXT NOT NULL, depth INTEGER NOT NULL, authority REAL NOT NULL,
  done INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS urls_next ON urls (done, depth, authority DESC);
CREATE TABLE IF NOT EXISTS nodes (
  node TEXT PRIMARY KEY, known INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Target:
    """node: registrable domain. depth: links from a seed. authority: 0..1, higher goes first."""

    url: str
    node: str
    depth: int
    authority: float


class Frontier:
    """per_node: how many URLs of one registrable domain are ever taken in."""

    def __init__(self, file: Path, per_node: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._per_node = per_node
        self._database = sqlite3.connect(file, timeout=30)
        with readable(file, self._database):
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(_SCHEMA)

    def close(self) -> None:
        self._database.close()

    def remove(self) -> None:
        """Close, and forget a crawl that is complete."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)

    def settle(self, done: Iterable[str], found: Sequence[Target]) -> None:
        """One checkpoint: these URLs are done, those were found on them."""
        with self._database:
            self._database.executemany(
                "UPDATE urls SET done = 1 WHERE url = ?", [(u,) for u in done]
            )
            for target in found:
                self._add(target)

    def _add(self, target: Target) -> None:
        row = self._database.execute(
            "SELECT known FROM nodes WHERE node = ?", (target.node,)
        ).fetchone()
        known = row[0] if row else 0
        if known >= self._per_node:
            return
        added = self._database.execute(
            "INSERT OR IGNORE INTO urls (url, node, depth, authority) VALUES (?, ?, ?, ?)",
            (target.url, target.node, target.depth, target.authority),
        ).rowcount
        if added:
            self._database.execute(
                "INSERT OR REPLACE INTO nodes VALUES (?, ?)", (target.node, known + 1)
            )

    def next(self, taken: Sequence[str], busy: Sequence[str]) -> Target | None:
        """The first open URL by depth, then authority, then order of discovery.

        taken: URLs in work. busy: nodes that are being asked already.
        """
        no_urls = ",".join("?" * len(taken))
        no_nodes = ",".join("?" * len(busy))
        row = self._database.execute(
            "SELECT url, node, depth, authority FROM urls WHERE done = 0"  # nosec B608
            f" AND url NOT IN ({no_urls}) AND node NOT IN ({no_nodes})"
            " ORDER BY depth, authority DESC, rowid LIMIT 1",
            (*taken, *busy),
        ).fetchone()
        return Target(*row) if row else None

    def counts(self) -> tuple[int, int]:
        """(URLs done, URLs open)."""
        rows = dict(self._database.execute("SELECT done, COUNT(*) FROM urls GROUP BY done"))
        return rows.get(1, 0), rows.get(0, 0)
