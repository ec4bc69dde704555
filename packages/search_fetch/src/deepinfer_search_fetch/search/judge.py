"""What one candidate is worth: calibrated relevance, source authority, freshness, and their sum."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

from deepinfer_search_fetch.analyzers import WantedTerms
from deepinfer_search_fetch.index.authority import AuthorityTable
from deepinfer_search_fetch.index.backend import day_number
from deepinfer_search_fetch.index.dedupe import Fingerprint
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.models import Authority, SearchRequest
from deepinfer_search_fetch.search import relevance as calibrated
from deepinfer_search_fetch.search.query import ParsedQuery

AUTHORITY_WEIGHT = 1.2
FRESHNESS_WEIGHT = 0.3
FRESH_INTENT_WEIGHT = 1.0
HALF_LIFE_DAYS = 365.0
NEWS_HALF_LIFE_DAYS = 7.0
LANGUAGE_BOOST = 0.5
COUNTRY_BOOST = 0.3
WEAK, STRONG = 0.1, 0.5
_NEWS = re.compile(
    r"\b(?:news|latest|today|breaking|this week|aktuell|nachrichten|actualités)\b"
    r"|最新|新闻|新聞|今天|今日|ニュース|뉴스",
    re.I,
)


@dataclass(slots=True)
class Scored:
    """A judged candidate.

    host: "" for what is no URL. order: log-odds that results are sorted by. source: "index" or an
    upstream's name. members: the copies folded into it, itself not included.
    """

    page: IndexedPage
    host: str
    source: str
    relevance: float
    freshness: float
    authority: Authority
    order: float
    fingerprint: Fingerprint
    members: list[Scored] = field(default_factory=list["Scored"])

    @property
    def score(self) -> float:
        """0..1."""
        return 1.0 / (1.0 + math.exp(-self.order))


@dataclass(frozen=True)
class Judge:
    """Judges the candidates of one request.

    idf: weight per query term. clock: seconds since 1970, for the age of pages.
    """

    request: SearchRequest
    parsed: ParsedQuery
    idf: Mapping[str, float]
    authorities: AuthorityTable
    clock: Callable[[], float]

    @cached_property
    def _today(self) -> int:
        return day_number(datetime.fromtimestamp(self.clock(), UTC).isoformat()) or 0

    @cached_property
    def fresh_wanted(self) -> bool:
        """The request asks for recent pages, by a filter or by its words."""
        return self.request.freshness is not None or bool(_NEWS.search(self.request.query))

    @cached_property
    def _wanted(self) -> WantedTerms:
        return calibrated.wanted_terms(self.parsed.terms, self.idf)

    def __call__(self, page: IndexedPage, score: float, best: float, source: str) -> Scored:
        """score, best: retrieval score of the page and of the best page of its source."""
        relevance = 1.0  # only filters were asked for, and they are met
        if self.parsed.terms:
            row = calibrated.features(page, score, best, self._wanted, self.idf)
            relevance = calibrated.load_calibration().relevance(row)
        host = page.host
        authority = self.authorities.of_page(page.url, host)
        freshness = self._freshness(page)
        odds = min(max(relevance, 1e-6), 1 - 1e-6)
        order = math.log(odds / (1 - odds)) + AUTHORITY_WEIGHT * (authority.score - 0.5)
        order += (FRESH_INTENT_WEIGHT if self.fresh_wanted else FRESHNESS_WEIGHT) * freshness
        order += self._locality(page, host)
        # No authority and no freshness lifts an irrelevant result above a clearly relevant one.
        if relevance < WEAK:
            order = min(order, math.log(WEAK / (1 - WEAK)))
        elif relevance > STRONG:
            order = max(order, 0.0)
        return Scored(page, host, source, relevance, freshness, authority, order, page.copy_print)

    def _freshness(self, page: IndexedPage) -> float:
        day = day_number(page.published)
        if day is None:
            return 0.0
        half_life = NEWS_HALF_LIFE_DAYS if self.fresh_wanted else HALF_LIFE_DAYS
        return 2.0 ** (-max(0, self._today - day) / half_life)

    def _locality(self, page: IndexedPage, host: str) -> float:
        wanted = self.request.language
        bonus = LANGUAGE_BOOST if wanted and page.language == wanted.partition("-")[0] else 0.0
        country = (self.request.country or "").lower()
        if country and host.endswith((f".{country}", ".uk" if country == "gb" else "\0")):
            bonus += COUNTRY_BOOST
        return bonus
