"""Source authority by an open formula: A = (n·L + 4·P) / (n + 4).

P is the prior of the host (`priors.yaml`), L its place in a link graph and n the evidence,
min(12, log2(1 + referring domains)). Without a link graph n is 0 and A is the prior.
"""

from __future__ import annotations

import math
import re
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.database import readable
from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.index.priors import Priors, Rule, load_priors
from deepinfer_search_fetch.models import Authority

PRIOR_WEIGHT = 4.0
MAX_EVIDENCE = 12.0
USER_AREA_CAP = 0.6
COMMON_CRAWL_DISCOUNT = 0.9
GraphSource = Literal["own", "common_crawl"]
_BASIS: dict[str, str] = {"own": "own_graph", "common_crawl": "cc_host_rank"}
_USER_AREA = re.compile(r"/(?:@|~|users?/|u/|profile/|members?/)|#comment|/comments?/", re.I)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS evidence (
  host TEXT NOT NULL, source TEXT NOT NULL, harmonic_position INTEGER NOT NULL,
  pagerank_position INTEGER NOT NULL, hosts INTEGER NOT NULL, referring_domains INTEGER,
  PRIMARY KEY (host, source)) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class LinkEvidence:
    """A host in a link graph: ranks from 0 (best) of `hosts`, and how many domains refer to it.

    referring_domains: None where the graph does not say (Common Crawl's published ranks).
    """

    harmonic_position: int
    pagerank_position: int
    hosts: int
    referring_domains: int | None

    @property
    def link_score(self) -> float:
        """L = 0.6·r_H + 0.4·r_PR with r = 1 - ln(1 + position) / ln(1 + hosts)."""
        scale = math.log(1 + max(self.hosts, 1))
        harmonic = 1 - math.log(1 + self.harmonic_position) / scale
        pagerank = 1 - math.log(1 + self.pagerank_position) / scale
        return max(0.0, min(1.0, 0.6 * harmonic + 0.4 * pagerank))

    @property
    def weight(self) -> float:
        """The evidence n. Without a count, a host's place stands for it: 12 for the first host."""
        if self.referring_domains is None:
            return MAX_EVIDENCE * self.link_score
        return min(MAX_EVIDENCE, math.log2(1 + self.referring_domains))


Evidence = dict[GraphSource, LinkEvidence]
_NOTHING: Evidence = {}


def node_of(host: str) -> str:
    """The node a host belongs to: its registrable domain by the Public Suffix List, private section
    included, so that every user of a hosting domain is a node of their own."""
    return urls.registrable_domain(host)


class AuthorityTable:
    """Authority of pages from priors and stored link evidence.

    file: database written by `write_evidence`, read again when it changes; None or a missing file
    leaves the priors.
    """

    def __init__(self, file: Path | None = None, priors: Priors | None = None) -> None:
        self._file = file
        self._priors = priors or load_priors()
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, Evidence] = {}
        self._sources: dict[str, tuple[Evidence, _Source]] = {}

    def of_page(self, url: str, host: str | None = None) -> Authority:
        """Authority of one page's source; what is no URL has the unknown prior.

        host: of `url`, if it is known already.
        """
        host = _host(url) if host is None else host
        evidence = self.evidence(host)
        known = self._sources.get(host)
        if known is None or known[0] is not evidence:
            known = (evidence, _source(host, evidence, self._priors))
            self._sources[host] = known
        return _page(url, known[1])

    def explain(self, url_or_host: str) -> tuple[Authority, dict[str, Any]]:
        """The authority of a URL (or a bare host name) and every input of the formula."""
        url = url_or_host if "://" in url_or_host else f"https://{url_or_host}/"
        urls.parse(url)
        return _judge(url, self.evidence(_host(url)), self._priors)

    def evidence(self, host: str) -> Evidence:
        """What link graphs say about a host; empty for nothing."""
        if self._file is None or not host:
            return _NOTHING
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return _NOTHING
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp != self._stamp or len(self._known) > 100_000:
            self._known, self._sources, self._stamp = {}, {}, stamp
        if host not in self._known:
            self._known[host] = read_evidence(self._file, node_of(host))
        return self._known[host]


def read_evidence(file: Path, node: str) -> Evidence:
    """The stored evidence of one node."""
    query = (
        "SELECT source, harmonic_position, pagerank_position, hosts, referring_domains"
        " FROM evidence WHERE host = ?"
    )
    source = f"file:{file}?mode=ro"
    with readable(file), closing(sqlite3.connect(source, uri=True)) as database:
        return {row[0]: LinkEvidence(*row[1:]) for row in database.execute(query, (node,))}


def write_evidence(file: Path, source: GraphSource, rows: dict[str, LinkEvidence]) -> None:
    """Replace everything known from `source` in one transaction."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with readable(file), closing(sqlite3.connect(file)) as database, database:
        database.execute(_SCHEMA)
        database.execute("DELETE FROM evidence WHERE source = ?", (source,))
        database.executemany(
            "INSERT INTO evidence VALUES (?, ?, ?, ?, ?, ?)",
            (
                (host, source, e.harmonic_position, e.pagerank_position, e.hosts,
                 e.referring_domains)
                for host, e in rows.items()
            ),
        )  # fmt: skip


def authority(url: str, evidence: LinkEvidence | None = None) -> Authority:
    """Authority of one page's source from the shipped priors and, if given, a place in a graph."""
    return explain(url, evidence)[0]


def explain(url: str, evidence: LinkEvidence | None = None) -> tuple[Authority, dict[str, Any]]:
    """The authority of `url` (or of a bare host name) and every input of the formula."""
    text = url if "://" in url or not url else f"https://{url}/"
    return _judge(text, {} if evidence is None else {"own": evidence}, load_priors())


def combine(evidence: Evidence) -> tuple[float, float]:
    """(L, n) of all graphs together: L = max(0.9·L_cc, L_own), n the larger evidence."""
    own, crawl = evidence.get("own"), evidence.get("common_crawl")
    if own is None or crawl is None:
        one = own or crawl
        return (one.link_score, one.weight) if one else (0.0, 0.0)
    link = max(COMMON_CRAWL_DISCOUNT * crawl.link_score, own.link_score)
    return link, max(own.weight, crawl.weight)


def tier(score: float, prior: float) -> int:
    """-1 for a source listed as harmful (prior 0), else 0..4 by fifths."""
    return -1 if prior == 0 else min(4, int(score * 5))


@dataclass(frozen=True, slots=True)
class _Source:
    """score: A of the host, before what depends on the page."""

    score: float
    rule: Rule
    basis: tuple[str, ...]


def _source(host: str, evidence: Evidence, priors: Priors) -> _Source:
    rule = priors.of_host(host)
    link, n = combine(evidence)
    score = (n * link + PRIOR_WEIGHT * rule.prior) / (n + PRIOR_WEIGHT)
    if rule.prior == 0:
        score = 0.0  # links cannot redeem a listed source
    basis = (f"prior:{rule.kind}", *(_BASIS[source] for source in sorted(evidence)))
    return _Source(score, rule, basis)


def _page(url: str, source: _Source) -> Authority:
    page = source.score * (0.9 + 0.1 * url.startswith("https://"))
    if _USER_AREA.search(_target(url)):
        page = min(page, USER_AREA_CAP)
    page = round(page, 4)
    return Authority(score=page, tier=tier(page, source.rule.prior), basis=list(source.basis))


def _judge(url: str, evidence: Evidence, priors: Priors) -> tuple[Authority, dict[str, Any]]:
    host = _host(url)
    source = _source(host, evidence, priors)
    link, n = combine(evidence)
    inputs: dict[str, Any] = {
        "host": host,
        "node": node_of(host) if host else "",
        "prior": source.rule.prior,
        "prior_kind": source.rule.kind,
        "prior_rule": source.rule.suffix,
        "prior_reason": source.rule.reason,
        "prior_reviewed": source.rule.reviewed,
        "graphs": {name: asdict(e) for name, e in sorted(evidence.items())},
        "evidence": round(n, 4),
        "link_score": round(link, 4),
        "https": url.startswith("https://"),
        "user_area": bool(_USER_AREA.search(_target(url))),
        "formula": "A = (evidence*link_score + 4*prior)/(evidence + 4) * (0.9 + 0.1*https)",
    }
    return _page(url, source), inputs


@lru_cache(maxsize=20_000)
def _host(url: str) -> str:
    try:
        return urls.parse(url).host if url else ""
    except SearchFetchError:
        return ""


def _target(url: str) -> str:
    return "/" + url.partition("://")[2].partition("/")[2]
