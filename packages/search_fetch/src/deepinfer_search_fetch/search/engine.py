"""Search: retrieve, judge relevance, order, drop duplicates, diversify, describe."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from deepinfer_search_fetch.extract.tokens import count_tokens, paginate
from deepinfer_search_fetch.index.authority import authority
from deepinfer_search_fetch.index.dedupe import fingerprint, near_duplicates
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import Hit, SearchBackend, day_number
from deepinfer_search_fetch.models import (
    Authority,
    SearchRequest,
    SearchResponse,
    SearchResult,
    Usage,
)
from deepinfer_search_fetch.search import relevance as calibrated
from deepinfer_search_fetch.search.query import ParsedQuery, parse_query
from deepinfer_search_fetch.search.retrieve import (
    CANDIDATES,
    Filters,
    inverse_frequencies,
    retrieve,
)
from deepinfer_search_fetch.search.snippets import snippet, summary

AUTHORITY_WEIGHT = 1.2
FRESHNESS_WEIGHT = 0.3
FRESH_INTENT_WEIGHT = 1.0
HALF_LIFE_DAYS = 365.0
NEWS_HALF_LIFE_DAYS = 7.0
LANGUAGE_BOOST = 0.5
SAME_HOST_SIMILARITY = 0.5
_WEAK, _STRONG = 0.1, 0.5
_PERIOD_DAYS = {"day": 1, "week": 7, "month": 31, "year": 366}
_MIN_JUDGED = 50


@dataclass(slots=True)
class _Scored:
    hit: Hit
    relevance: float
    freshness: float
    authority: Authority
    key: float
    fingerprint: tuple[int, int]
    alternates: list[str] = field(default_factory=list[str])

    @property
    def page(self) -> IndexedPage:
        return self.hit.page

    @property
    def score(self) -> float:
        return 1.0 / (1.0 + math.exp(-self.key))


def search(
    backend: SearchBackend, request: SearchRequest, *, clock: Callable[[], float] = time.time
) -> SearchResponse:
    """Answer a request from one index. An empty list is an answer, and is not billable."""
    started = time.monotonic()
    today = datetime.fromtimestamp(clock(), UTC)
    parsed = parse_query(request.query)
    hits = retrieve(backend, parsed, _filters(request, today), expand=request.expand)
    idf = inverse_frequencies(backend, parsed.terms)
    judged = max(_MIN_JUDGED, 3 * (request.offset + request.count))
    scored = [_judge(h, hits[0].score, parsed, idf, request, today) for h in hits[:judged]]
    scored = [
        s
        for s in scored
        if s.relevance >= request.min_relevance and s.authority.score >= request.min_authority
    ]
    scored.sort(key=lambda item: (-item.key, item.page.doc_id))
    if request.dedupe:
        scored = _collapse(scored)
    per_host = None if parsed.sites or len(request.include_domains) == 1 else request.max_per_host
    ranked = _diversify(scored, request.diversity, per_host)
    window = ranked[request.offset : request.offset + request.count]
    results = _results(window, request, idf)
    return SearchResponse(
        query=request.query,
        results=results,
        total_estimate=len(ranked) if len(hits) < CANDIDATES else max(len(ranked), CANDIDATES),
        generation=backend.generation(),
        corrections=None,
        warnings=[] if backend.size() else ["index_empty"],
        usage=Usage(billable=bool(results), unit="search", quantity=int(bool(results))),
        elapsed_ms=int((time.monotonic() - started) * 1000),
    )


def _filters(request: SearchRequest, today: datetime) -> Filters:
    days: tuple[int | None, int | None] | None = None
    if request.freshness in _PERIOD_DAYS:
        since = today - timedelta(days=_PERIOD_DAYS[request.freshness])
        days = (day_number(since.isoformat()), None)
    elif request.freshness:
        low, _, high = request.freshness.partition("..")
        days = (day_number(low), day_number(high))
    language = (request.language or "").partition("-")[0] or None
    return Filters(
        sites=tuple(d.lower().strip(".") for d in request.include_domains),
        blocked_sites=tuple(d.lower().strip(".") for d in request.exclude_domains),
        language=language if request.strict_language else None,
        day_range=days,
    )


def _judge(
    hit: Hit,
    best_score: float,
    parsed: ParsedQuery,
    idf: dict[str, float],
    request: SearchRequest,
    today: datetime,
) -> _Scored:
    page = hit.page
    if parsed.terms:
        row = calibrated.features(page, hit.score, best_score, parsed.terms, idf)
        relevance = calibrated.load_calibration().relevance(row)
    else:
        relevance = 1.0  # only filters were asked for, and they are met
    source = authority(page.url if page.host else "")
    fresh_wanted = request.freshness is not None
    freshness = _freshness(page, today, NEWS_HALF_LIFE_DAYS if fresh_wanted else HALF_LIFE_DAYS)
    odds = min(max(relevance, 1e-6), 1 - 1e-6)
    key = math.log(odds / (1 - odds)) + AUTHORITY_WEIGHT * (source.score - 0.5)
    key += (FRESH_INTENT_WEIGHT if fresh_wanted else FRESHNESS_WEIGHT) * freshness
    if request.language and page.language == request.language.partition("-")[0]:
        key += LANGUAGE_BOOST
    # No authority and no freshness lifts an irrelevant result above a clearly relevant one.
    if relevance < _WEAK:
        key = min(key, math.log(_WEAK / (1 - _WEAK)))
    elif relevance > _STRONG:
        key = max(key, 0.0)
    return _Scored(hit, relevance, freshness, source, key, fingerprint(page.content))


def _freshness(page: IndexedPage, today: datetime, half_life: float) -> float:
    day = day_number(page.published)
    now = day_number(today.isoformat())
    if day is None or now is None:
        return 0.0
    return 2.0 ** (-max(0, now - day) / half_life)


def _collapse(scored: list[_Scored]) -> list[_Scored]:
    kept: list[_Scored] = []
    for item in scored:
        twin = next((k for k in kept if near_duplicates(k.fingerprint, item.fingerprint)), None)
        if twin is None:
            kept.append(item)
        else:
            twin.alternates.append(item.page.url)
    return kept


def _diversify(scored: list[_Scored], diversity: float, max_per_host: int | None) -> list[_Scored]:
    """Greedy by (1-d)·score - d·similarity to what was chosen; a host fills at most
    `max_per_host` of any ten in a row, and what exceeds that moves down, it is not lost."""
    rest = list(scored)
    chosen: list[_Scored] = []
    while rest:
        recent = Counter(c.page.host for c in chosen[-9:])
        hosts_seen = {c.page.host for c in chosen}

        def allowed(item: _Scored, recent: Counter[str] = recent) -> bool:
            return (
                max_per_host is None or not item.page.host or recent[item.page.host] < max_per_host
            )

        def value(item: _Scored, seen: set[str] = hosts_seen) -> float:
            similar = SAME_HOST_SIMILARITY if item.page.host and item.page.host in seen else 0.0
            return (1 - diversity) * item.score - diversity * similar

        options = [item for item in rest if allowed(item)] or rest
        best = max(options[:40], key=value)
        chosen.append(best)
        rest.remove(best)
    return chosen


def _results(
    window: list[_Scored], request: SearchRequest, idf: dict[str, float]
) -> list[SearchResult]:
    results: list[SearchResult] = []
    budget = request.max_tokens
    for rank, item in enumerate(window, start=request.offset + 1):
        page = item.page
        text, marks = snippet(page.content, idf)
        content: str | None = None
        tokens = 0
        if request.content == "full" and budget > 0:
            part = paginate(page.content, 0, min(request.max_tokens_per_result, budget))
            content, tokens = part.text, part.returned
            budget -= tokens
        long = summary(page.content, idf) if request.content != "none" else ""
        results.append(
            SearchResult(
                rank=rank,
                id=page.doc_id,
                url=page.url,
                title=page.title,
                site_name=page.site_name or page.host,
                language=page.language,
                published=page.published,
                fetched_at=page.fetched_at,
                snippet=text,
                highlights=marks,
                summary=long,
                content=content,
                tokens=tokens or count_tokens(long or text),
                relevance=round(item.relevance, 4),
                score=round(item.score, 4),
                freshness=round(item.freshness, 4),
                authority=item.authority,
                duplicates=len(item.alternates),
                alternates=item.alternates,
                source="index",
            )
        )
    return results
