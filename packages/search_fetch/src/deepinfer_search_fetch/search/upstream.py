"""Other search engines beside the index: SearXNG and Brave.

Their results are candidates like any other: scored here on title and snippet, because their own
scores cannot be compared. A failing engine is a warning, and after FAILURES failures it rests.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.analyzers import terms
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError, UpstreamError
from deepinfer_search_fetch.index.backend import day_number
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.models import SearchRequest
from deepinfer_search_fetch.search.query import ParsedQuery
from deepinfer_search_fetch.search.retrieve import Filters

TIMEOUT_SECONDS = 3.0
FAILURES = 5
REST_SECONDS = 60.0
MAX_ANSWER_BYTES = 2 * 1024 * 1024
MAX_HITS = 20
_K1 = 1.2
_TAG = re.compile(r"<[^<>]{0,200}>")


@dataclass(frozen=True, slots=True)
class RawHit:
    """One result as an engine gave it. published: a day or RFC 3339 time."""

    url: str
    title: str
    snippet: str
    published: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """unresponsive: engines behind the engine that did not answer."""

    hits: Sequence[RawHit]
    unresponsive: Sequence[str] = ()


class UpstreamEngine(Protocol):
    """`search` may block for TIMEOUT_SECONDS and raises UpstreamError."""

    def search(self, query: str, n: int, language: str | None, freshness: str | None) -> Answer: ...


class SearxNG:
    """A SearXNG instance with its JSON format switched on. url: its base, chosen by the operator
    (no address guard applies)."""

    _RANGES = frozenset({"day", "week", "month", "year"})

    def __init__(self, url: str, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._url = url.rstrip("/") + "/search"
        self._timeout = timeout

    def search(self, query: str, n: int, language: str | None, freshness: str | None) -> Answer:
        """See `UpstreamEngine`."""
        fields = {"q": query, "format": "json", "language": language or "all"}
        if freshness in self._RANGES:
            fields["time_range"] = freshness
        data = _get_json(self._url, fields, {}, self._timeout)
        unresponsive = [
            str(entry[0] if isinstance(entry, list) and entry else entry)
            for entry in _list(data.get("unresponsive_engines"))
        ]
        hits = [
            _hit(r, "url", "title", "content", r.get("publishedDate"))
            for r in _list(data.get("results"))
            if isinstance(r, dict)
        ]
        return Answer([h for h in hits if h][:n], unresponsive)


class Brave:
    """The Brave Search API. key: sent as X-Subscription-Token and shown nowhere."""

    _RANGES: Mapping[str, str] = {"day": "pd", "week": "pw", "month": "pm", "year": "py"}

    def __init__(
        self,
        key: str,
        *,
        url: str = "https://api.search.brave.com/res/v1/web/search",
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._key = key
        self._url = url
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"Brave(url={self._url!r})"

    def search(self, query: str, n: int, language: str | None, freshness: str | None) -> Answer:
        """See `UpstreamEngine`."""
        # The API takes at most 400 characters and 50 words.
        words = " ".join(query.split()[:50])[:400]
        fields = {"q": words, "count": str(min(n, 20)), "text_decorations": "false"}
        if language:
            fields["search_lang"] = language
        if freshness:
            fields["freshness"] = self._RANGES.get(freshness, freshness.replace("..", "to"))
        headers = {"X-Subscription-Token": self._key}
        data = _get_json(self._url, fields, headers, self._timeout)
        web = data.get("web")
        results = _list(web.get("results")) if isinstance(web, dict) else []
        hits = [
            _hit(r, "url", "title", "description", r.get("page_age"))
            for r in results
            if isinstance(r, dict)
        ]
        return Answer([h for h in hits if h][:n])


class Breaker:
    """Lets calls through until FAILURES in a row failed, then none for REST_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0
        self._turn = threading.Lock()

    def allows(self) -> bool:
        return self._clock() >= self._open_until

    def report(self, ok: bool) -> None:
        """Count one call."""
        with self._turn:
            self._failures = 0 if ok else self._failures + 1
            if self._failures >= FAILURES:
                self._open_until = self._clock() + REST_SECONDS
                self._failures = 0


# name, page, score, best score of that engine
Outside = tuple[str, IndexedPage, float, float]


@dataclass(frozen=True, slots=True)
class Collected:
    hits: list[Outside] = field(default_factory=list[Outside])
    warnings: list[str] = field(default_factory=list[str])
    unresponsive: list[str] = field(default_factory=list[str])


class Upstreams:
    """The configured engines by name, each behind its own breaker."""

    def __init__(
        self,
        engines: Mapping[str, UpstreamEngine] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = dict(engines or {})
        self._breakers = {name: Breaker(clock) for name in self._engines}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def names(self) -> list[str]:
        """Configured engines, in order."""
        return sorted(self._engines)

    def start(self, request: SearchRequest, filters: Filters, parsed: ParsedQuery) -> Pending:
        """Ask the engines named in `request.sources`; the answers are collected later."""
        names = [s.removeprefix("upstream:") for s in request.sources if s != "index"]
        for name in names:
            if name not in self._engines:
                known = ", ".join(f"upstream:{n}" for n in self.names) or "none"
                raise InvalidRequestError(
                    "invalid_argument",
                    f"sources: 'upstream:{name}' is not configured (configured: {known})",
                )
        flights: dict[str, Future[Answer] | None] = {}
        language = request.language.partition("-")[0] if request.language else parsed.language
        count = min(MAX_HITS, request.offset + request.count)
        for name in dict.fromkeys(names):
            if not self._breakers[name].allows():
                flights[name] = None
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(8, "upstream")
            flights[name] = self._pool.submit(
                self._engines[name].search, request.query, count, language, request.freshness
            )
        return Pending(flights, self._breakers, filters, parsed)


@dataclass(frozen=True, slots=True)
class Pending:
    """Questions that are on their way."""

    flights: Mapping[str, Future[Answer] | None]
    breakers: Mapping[str, Breaker]
    filters: Filters
    parsed: ParsedQuery

    def collect(self, idf: Mapping[str, float], now: datetime) -> Collected:
        """Wait (at most a little over TIMEOUT_SECONDS), filter and score."""
        out = Collected()
        deadline = time.monotonic() + TIMEOUT_SECONDS + 0.5
        for name, flight in self.flights.items():
            if flight is None:
                out.warnings.append(f"upstream_resting:{name}")
                out.unresponsive.append(name)
                continue
            try:
                answer = flight.result(max(0.0, deadline - time.monotonic()))
            except (SearchFetchError, TimeoutError) as error:
                self.breakers[name].report(ok=False)
                reason = getattr(error, "code", "timeout")
                out.warnings.append(f"upstream_failed:{name}:{reason}")
                out.unresponsive.append(name)
                continue
            self.breakers[name].report(ok=True)
            out.unresponsive.extend(f"{name}/{engine}" for engine in answer.unresponsive)
            pages = [p for p in (self._page(hit, now) for hit in answer.hits) if p is not None]
            scores = [_lexical_score(page, idf) for page in pages]
            best = max(scores, default=0.0)
            out.hits.extend(
                (name, page, score, best) for page, score in zip(pages, scores, strict=True)
            )
        return out

    def _page(self, hit: RawHit, now: datetime) -> IndexedPage | None:
        """The hit as a page, None for what the request's filters leave out."""
        try:
            url = urls.parse(hit.url)
        except SearchFetchError:
            return None
        sites = (*self.filters.sites, *self.parsed.sites)
        blocked = (*self.filters.blocked_sites, *self.parsed.blocked_sites)
        if sites and not any(urls.domain_matches(url.host, d) for d in sites):
            return None
        if any(urls.domain_matches(url.host, d) for d in blocked):
            return None
        if not self._in_days(hit.published):
            return None
        moment = now.isoformat(timespec="seconds").replace("+00:00", "Z")
        return IndexedPage(
            urls.canonical(url), hit.title, hit.snippet, moment, None, hit.published, url.host
        )

    def _in_days(self, published: str | None) -> bool:
        low, high = self.filters.day_range or (None, None)
        bounds = [b for b in (low, high, self.parsed.after, self.parsed.before) if b is not None]
        day = day_number(published)
        if not bounds:
            return True
        if day is None:
            return False
        lows = [b for b in (low, self.parsed.after) if b is not None]
        highs = [b for b in (high, self.parsed.before) if b is not None]
        return all(day >= b for b in lows) and all(day <= b for b in highs)


def _lexical_score(page: IndexedPage, idf: Mapping[str, float]) -> float:
    """BM25 without length, title words counted twice."""
    title = terms(page.title)
    found = title + title + terms(page.content)
    total = 0.0
    for term, weight in idf.items():
        n = found.count(term)
        total += weight * n * (_K1 + 1) / (n + _K1)
    return total


def _hit(
    row: Mapping[str, Any], url: str, title: str, snippet: str, published: Any
) -> RawHit | None:
    link = row.get(url)
    if not isinstance(link, str):
        return None
    day = published if isinstance(published, str) and day_number(published) is not None else None
    return RawHit(link, _plain(row.get(title)) or link, _plain(row.get(snippet)), day)


def _plain(value: Any) -> str:
    return " ".join(_TAG.sub(" ", value).split())[:2000] if isinstance(value, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _get_json(
    url: str, fields: Mapping[str, str], headers: Mapping[str, str], timeout: float
) -> dict[str, Any]:
    """One GET; no redirect is followed, so a key goes to the configured host only."""
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    deadline = time.monotonic() + timeout
    try:
        target = f"{parts.path or '/'}?{urlencode(fields)}"
        connection.request("GET", target, headers={"Accept": "application/json", **headers})
        body = b""
        with connection.getresponse() as response:
            while chunk := response.read1(65536):
                body += chunk
                if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
                    raise UpstreamError(
                        "timeout", "the search engine's answer is too long or too slow"
                    )
        if response.status != 200:
            hint = " (is its JSON format switched on?)" if response.status == 403 else ""
            raise UpstreamError(
                "upstream_http", f"the search engine answered HTTP {response.status}{hint}"
            )
        data = json.loads(body)
    except TimeoutError:
        raise UpstreamError("timeout", "the search engine took too long") from None
    except (OSError, HTTPException) as error:
        raise UpstreamError("connect_failure", f"search engine: {type(error).__name__}") from None
    except (ValueError, RecursionError):
        raise UpstreamError("upstream_http", "the search engine's answer is not JSON") from None
    finally:
        connection.close()
    if not isinstance(data, dict):
        raise UpstreamError("upstream_http", "the search engine's answer is no JSON object")
    return data
