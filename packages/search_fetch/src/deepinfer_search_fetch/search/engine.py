"""Search: retrieve, judge relevance, order, drop duplicates, diversify, describe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.extract.tokens import count_tokens, paginate
from deepinfer_search_fetch.index.authority import AuthorityTable
from deepinfer_search_fetch.index.backend import Hit, SearchBackend, day_number
from deepinfer_search_fetch.models import SearchRequest, SearchResponse, SearchResult, Usage
from deepinfer_search_fetch.search.corrections import correction
from deepinfer_search_fetch.search.dense import Embedder, rerank
from deepinfer_search_fetch.search.judge import Judge, Scored
from deepinfer_search_fetch.search.order import Ordering
from deepinfer_search_fetch.search.query import parse_query
from deepinfer_search_fetch.search.retrieve import (
    CANDIDATES,
    Filters,
    inverse_frequencies,
    retrieve,
)
from deepinfer_search_fetch.search.snippets import Passages
from deepinfer_search_fetch.search.upstream import Outside, Upstreams

BLOCKS = (0, 40, 200, 600)
_PERIOD_DAYS = {"day": 1, "week": 7, "month": 31, "year": 366}


@dataclass(frozen=True)
class SearchParts:
    """What searches besides the index. authorities: link evidence of hosts. upstreams: other
    search engines. embed: turns texts into vectors for the re-ranker, None for none."""

    authorities: AuthorityTable = field(default_factory=AuthorityTable)
    upstreams: Upstreams = field(default_factory=Upstreams)
    embed: Embedder | None = None


def search(
    index: SearchBackend,
    request: SearchRequest,
    *,
    parts: SearchParts | None = None,
    clock: Callable[[], float] = time.time,
) -> SearchResponse:
    """Answer a request. An empty list is an answer, and is not billable.

    Raises InvalidRequestError for an unknown name in `sources` or a day that does not exist.
    """
    started = time.monotonic()
    parts = parts or SearchParts()
    today = datetime.fromtimestamp(clock(), UTC)
    parsed = parse_query(request.query)
    filters = _filters(request, today)
    backend = index.snapshot()
    wanted = request.offset + request.count
    asked = parts.upstreams.start(request, filters, parsed)
    hits: list[Hit] = []
    warnings: list[str] = []
    if "index" in request.sources:
        hits = retrieve(backend, parsed, filters, expand=request.expand)
        if parts.embed is not None and request.rerank == "auto":
            hits = rerank(request.question or request.query, hits, parts.embed)
        if not backend.size():
            warnings.append("index_empty")
    idf = inverse_frequencies(backend, parsed.terms)
    judge = Judge(request, parsed, idf, parts.authorities, clock)
    outside = asked.collect(idf, today)
    one_site = bool(parsed.sites) or len(request.include_domains) == 1
    ordering = Ordering(
        wanted,
        dedupe=request.dedupe,
        diversity=request.diversity,
        max_per_host=None if one_site else request.max_per_host,
    )
    distinct = 0

    def deeper() -> list[Hit]:
        return retrieve(backend, parsed, filters, expand=request.expand, k=BLOCKS[-1])

    for block in _blocks(hits, deeper, outside.hits, judge):
        distinct += ordering.take(
            s
            for s in block
            if s.relevance >= request.min_relevance and s.authority.score >= request.min_authority
        )
        if ordering.full:
            break
    results = _results(ordering.results[request.offset : wanted], request, idf)
    return SearchResponse(
        query=request.query,
        results=results,
        total_estimate=max(distinct, len(hits) if ordering.full else 0),
        generation=backend.generation(),
        corrections=correction(backend, request.query) if len(hits) < request.count else None,
        warnings=warnings + outside.warnings,
        unresponsive_engines=outside.unresponsive,
        usage=Usage(billable=bool(results), unit="search", quantity=int(bool(results))),
        elapsed_ms=int((time.monotonic() - started) * 1000),
    )


def _blocks(
    hits: Sequence[Hit],
    deeper: Callable[[], Sequence[Hit]],
    outside: Sequence[Outside],
    judge: Judge,
) -> Iterator[list[Scored]]:
    """Judged candidates, block by block; upstream results stand in the first one.

    deeper: more hits than `hits`, asked for only when CANDIDATES were not enough.
    """
    best = hits[0].score if hits else 0.0
    known: set[str] = set()
    for start, end in pairwise(BLOCKS):
        if start == CANDIDATES and len(hits) == CANDIDATES:
            floor = hits[-1].score  # re-ranking may have lowered it
            # Known by their pages, not by their number: pages of all but one score may change
            # places when more are asked for.
            first = {h.page.url for h in hits}
            more = [h for h in deeper() if h.page.url not in first]
            hits = [*hits, *(h.scored(min(h.score, floor)) for h in more)]
        block = [judge(hit.page, hit.score, best, "index") for hit in hits[start:end]]
        block = [s for s in block if s.page.url not in known]
        if start == 0:
            known = {s.page.url for s in block}
            block += [
                judge(page, score, top, name)
                for name, page, score, top in outside
                if page.url not in known
            ]
        known |= {s.page.url for s in block}
        if not block:
            return
        yield block


def _filters(request: SearchRequest, today: datetime) -> Filters:
    days: tuple[int | None, int | None] | None = None
    if request.freshness in _PERIOD_DAYS:
        since = today - timedelta(days=_PERIOD_DAYS[request.freshness])
        days = (day_number(since.isoformat()), None)
    elif request.freshness:
        low, _, high = request.freshness.partition("..")
        days = (day_number(low), day_number(high))
        if None in days:
            raise InvalidRequestError(
                "invalid_argument",
                f"freshness: {request.freshness} names a day that does not exist",
            )
    language = (request.language or "").partition("-")[0] or None
    return Filters(
        sites=tuple(d.lower().strip(".") for d in request.include_domains),
        blocked_sites=tuple(d.lower().strip(".") for d in request.exclude_domains),
        language=language if request.strict_language else None,
        day_range=days,
    )


def _results(
    window: Sequence[Scored], request: SearchRequest, idf: Mapping[str, float]
) -> list[SearchResult]:
    results: list[SearchResult] = []
    budget = request.max_tokens
    for rank, item in enumerate(window, start=request.offset + 1):
        page = item.page
        passages = Passages(page.content, idf)
        text, marks = passages.snippet()
        content: str | None = None
        tokens = 0
        if request.content == "full" and budget > 0:
            part = paginate(page.content, 0, min(request.max_tokens_per_result, budget))
            content, tokens = part.text, part.returned
            budget -= tokens
        long = passages.summary() if request.content != "none" else ""
        results.append(
            SearchResult(
                rank=rank,
                id=page.doc_id,
                url=page.url,
                title=page.title,
                site_name=page.site_name or item.host,
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
                duplicates=len(item.members),
                alternates=sorted(m.page.url for m in item.members),
                source=item.source,
            )
        )
    return results
