"""The link graph of what was crawled: who links to whom, with which words, and the host ranks.

One SQLite file. Pages are replaced when they are read again, so counts never grow by re-crawling.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from deepinfer_search_fetch.database import readable
from deepinfer_search_fetch.index import centrality
from deepinfer_search_fetch.index.authority import LinkEvidence, node_of, write_evidence
from deepinfer_search_fetch.index.links import PageLinks

MAX_PAGES_PER_EDGE = 10
UNTRUSTED_WEIGHT = 0.1
MAX_ANCHORS = 50
_SCHEMA = """
CREATE TABLE IF NOT EXISTS hosts (
  host TEXT PRIMARY KEY, network TEXT NOT NULL, template TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS edges (
  page TEXT NOT NULL, source TEXT NOT NULL, target TEXT NOT NULL, trusted INTEGER NOT NULL,
  PRIMARY KEY (page, target)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS anchors (
  page TEXT NOT NULL, target_page TEXT NOT NULL, source TEXT NOT NULL, text TEXT NOT NULL,
  PRIMARY KEY (page, target_page)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS anchors_by_target ON anchors (target_page);
CREATE TABLE IF NOT EXISTS stale (page TEXT PRIMARY KEY) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Edge:
    """source, target: nodes. weight: sum over linking pages, 1 or UNTRUSTED_WEIGHT each, at most
    MAX_PAGES_PER_EDGE. trusted: at least one link is."""

    source: str
    target: str
    weight: float
    trusted: bool


class LinkGraph:
    """Open as a context manager, or `close()` it. file: SQLite database, made if missing."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(file, timeout=30, check_same_thread=False)
        with readable(file, self._database):
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def add_page(self, url: str, host: str, found: PageLinks, network: str = "") -> None:
        """Store the links of one page in place of what was known of it.

        network: the /24 (or /48) the host answered from, "" if unknown.
        """
        source = node_of(host)
        edges: dict[str, bool] = {}
        anchors: dict[str, str] = {}
        for link in found.links:
            target = node_of(link.url.partition("://")[2].partition("/")[0].partition(":")[0])
            if target != source:
                edges[target] = edges.get(target, False) or link.trusted
            if link.text and link.trusted and link.url != url:
                anchors[link.url] = link.text
        with self._database:
            # Old and new targets, and this page itself, have other anchors than the index holds.
            self._database.execute(
                "INSERT OR IGNORE INTO stale SELECT target_page FROM anchors WHERE page = ?", (url,)
            )
            self._database.executemany(
                "INSERT OR IGNORE INTO stale VALUES (?)", [(url,), *((u,) for u in anchors)]
            )
            self._database.execute("DELETE FROM edges WHERE page = ?", (url,))
            self._database.execute("DELETE FROM anchors WHERE page = ?", (url,))
            self._database.execute(
                "INSERT OR REPLACE INTO hosts VALUES (?, ?, ?)", (source, network, found.template)
            )
            self._database.executemany(
                "INSERT INTO edges VALUES (?, ?, ?, ?)",
                [(url, source, target, int(trusted)) for target, trusted in edges.items()],
            )
            self._database.executemany(
                "INSERT INTO anchors VALUES (?, ?, ?, ?)",
                [(url, target, source, text) for target, text in anchors.items()],
            )

    def anchors(self, url: str) -> str:
        """Texts of links to a page, one a line: one per linking domain and text, most frequent
        first, at most MAX_ANCHORS."""
        rows = self._database.execute(
            "SELECT text, COUNT(DISTINCT source) AS n FROM anchors WHERE target_page = ?"
            " GROUP BY text ORDER BY n DESC, text LIMIT ?",
            (url, MAX_ANCHORS),
        )
        return "\n".join(text for text, _ in rows)

    def stale(self) -> list[str]:
        """Pages whose anchors changed since `settled` was called."""
        return [url for (url,) in self._database.execute("SELECT page FROM stale ORDER BY page")]

    def settled(self) -> None:
        """The index holds the present anchors of every page."""
        with self._database:
            self._database.execute("DELETE FROM stale")

    def edges(self) -> list[Edge]:
        """Weighted edges between nodes; links inside one node were never stored.

        Of sources in one network with one template, which are one publisher's, only the heaviest
        counts for each target.
        """
        rows = self._database.execute(
            "SELECT e.source, e.target, SUM(e.trusted), COUNT(*), h.network, h.template"
            " FROM edges e JOIN hosts h ON h.host = e.source"
            " GROUP BY e.source, e.target ORDER BY e.source, e.target"
        )
        plain: list[Edge] = []
        grouped: dict[tuple[str, str, str], Edge] = {}
        for source, target, trusted, pages, network, template in rows:
            weight = min(float(MAX_PAGES_PER_EDGE), trusted + UNTRUSTED_WEIGHT * (pages - trusted))
            edge = Edge(source, target, weight, trusted > 0)
            if not network or not template:
                plain.append(edge)
                continue
            key = (network, template, target)
            known = grouped.get(key)
            if known is None or (edge.trusted, edge.weight) > (known.trusted, known.weight):
                grouped[key] = edge
        return sorted([*plain, *grouped.values()], key=lambda e: (e.source, e.target))

    def size(self) -> tuple[int, int]:
        """(pages with links to other hosts, edges between pages and hosts)."""
        row = self._database.execute("SELECT COUNT(DISTINCT page), COUNT(*) FROM edges").fetchone()
        return int(row[0]), int(row[1])


def rank_hosts(edges: Iterable[Edge]) -> dict[str, LinkEvidence]:
    """Evidence for every node of a graph: positions by harmonic centrality and PageRank, and the
    number of domains that refer to it by a trusted link."""
    kept = list(edges)
    names = sorted({e.source for e in kept} | {e.target for e in kept})
    if not names:
        return {}
    number = {name: i for i, name in enumerate(names)}
    source = np.array([number[e.source] for e in kept], np.int64)
    target = np.array([number[e.target] for e in kept], np.int64)
    weight = np.array([e.weight for e in kept])
    by_harmonic = centrality.positions(centrality.harmonic(len(names), source, target))
    by_rank = centrality.positions(centrality.pagerank(len(names), source, target, weight))
    referring: defaultdict[str, int] = defaultdict(int)
    for edge in kept:
        referring[edge.target] += edge.trusted
    return {
        name: LinkEvidence(int(by_harmonic[i]), int(by_rank[i]), len(names), referring[name])
        for i, name in enumerate(names)
    }


def build_authority(links: Path, output: Path) -> dict[str, int]:
    """Rank the stored link graph and write the evidence; returns what was counted."""
    with LinkGraph(links) as graph:
        edges = graph.edges()
        pages, _ = graph.size()
    rows = rank_hosts(edges)
    write_evidence(output, "own", rows)
    return {"pages": pages, "hosts": len(rows), "edges": len(edges)}
