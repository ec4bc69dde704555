"""The fetch pipeline: policy, cache, robots, host slot, guarded chain, extraction, paging."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.errors import (
    ContentError,
    InvalidRequestError,
    RefusedError,
    UpstreamError,
)
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.extract.tokens import TOKENIZER, count_tokens, paginate
from deepinfer_search_fetch.extract.worker import ExtractPool
from deepinfer_search_fetch.models import (
    CacheInfo,
    ExtractionInfo,
    FetchRequest,
    FetchResponse,
    Highlight,
    Link,
    RobotsInfo,
    TokenWindow,
    Usage,
)
from deepinfer_search_fetch.net.cache import STALE_IF_ERROR_SECONDS, CacheEntry, PageCache
from deepinfer_search_fetch.net.chain import Page, follow
from deepinfer_search_fetch.net.charset import decode_text
from deepinfer_search_fetch.net.guard import AddressPolicy
from deepinfer_search_fetch.net.politeness import HostSlots
from deepinfer_search_fetch.net.resolver import Resolver, SystemResolver
from deepinfer_search_fetch.net.robots import MAX_HOSTS, RobotsCache
from deepinfer_search_fetch.net.transport import Response, Transport
from deepinfer_search_fetch.present import outline, to_html, to_text

_ROBOTS_REDIRECTS = 5
_RETRY_AFTER_CAP_SECONDS = 300
_CRAWL_DELAY_CAP_SECONDS = 60.0
_CHALLENGE_CHARS = 1500
_CHALLENGE = re.compile(
    r"just a moment|checking (?:your browser|if the site connection is secure)"
    r"|enable javascript and cookies|verify (?:that )?you are (?:a )?human|are you a robot"
    r"|unusual traffic from your|complete the captcha|ddos protection by|press & hold to confirm"
    r"|before you continue to|bitte bestätigen sie, dass sie kein roboter",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A page and how it was obtained."""

    page: Page
    cache: CacheInfo
    robots: RobotsInfo
    warnings: tuple[str, ...] = ()


class Fetcher:
    """Fetches, caches and extracts; one per service. `resolver` and `clock` are for tests."""

    def __init__(
        self,
        config: Config,
        *,
        resolver: Resolver | None = None,
        policy: AddressPolicy | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._clock = clock
        self._policy = policy or AddressPolicy.from_config(config)
        self._transport = Transport(
            self._policy,
            resolver or SystemResolver(config.limits.dns_seconds),
            config.limits,
            config.user_agent,
        )
        self._slots = HostSlots(
            config.host_requests_per_second,
            config.host_burst,
            config.host_connections,
            config.host_queue,
        )
        self._robots = RobotsCache(self._get_robots)
        self._cache = PageCache(config.home / "cache", config.cache_bytes, clock=clock)
        self._pool = ExtractPool(config.extract_workers, config.limits)
        self._delays: dict[str, float] = {}
        self._flights: dict[str, asyncio.Task[Loaded]] = {}

    async def close(self) -> None:
        for flight in self._flights.values():
            flight.cancel()
        await self._pool.close()
        self._cache.close()

    async def fetch(
        self,
        request: FetchRequest,
        *,
        allowed_domains: Sequence[str] = (),
        blocked_domains: Sequence[str] = (),
        network: bool = True,
        crawl: bool = False,
    ) -> FetchResponse:
        """One page, cleaned. Raises SearchFetchError.

        allowed_domains, blocked_domains: hold for the URL and every redirect. network: False
        answers from the cache only. crawl: robots.txt rules of crawling apply.
        """
        started = time.monotonic()
        loaded, extraction = await self.read(
            request,
            allowed_domains=allowed_domains,
            blocked_domains=blocked_domains,
            network=network,
            crawl=crawl,
        )
        elapsed = int((time.monotonic() - started) * 1000)
        return self._response(request, loaded, extraction, elapsed)

    async def read(
        self,
        request: FetchRequest,
        *,
        allowed_domains: Sequence[str] = (),
        blocked_domains: Sequence[str] = (),
        network: bool = True,
        crawl: bool = False,
    ) -> tuple[Loaded, Extraction]:
        """What `fetch` makes its response of: the page as it came and what was extracted."""
        if request.render == "always" or request.wait_for is not None:
            raise ContentError(
                "feature_unavailable", "this version has no renderer; use render=never"
            )
        url = urls.parse(request.url)
        domains = _DomainRule(tuple(allowed_domains), tuple(blocked_domains))
        try:
            async with asyncio.timeout(min(request.timeout, self._config.limits.total_seconds)):
                loaded = await self.load(
                    url, request, domains=domains, network=network, crawl=crawl
                )
                for hop in loaded.page.hops:  # a cached page was fetched under other rules
                    domains.check(urls.parse(hop.to_url))
                _raise_for_status(loaded.page.response)
                extraction = await self._extract(loaded.page, request)
        except TimeoutError:
            raise UpstreamError(
                "timeout", f"not finished within {request.timeout:g} seconds"
            ) from None
        _refuse_challenge(loaded.page.response, extraction)
        return loaded, extraction

    async def load(
        self,
        url: urls.Url,
        request: FetchRequest,
        *,
        domains: _DomainRule | None = None,
        network: bool = True,
        crawl: bool = False,
    ) -> Loaded:
        """The page's bytes from the cache or the network; identical loads share one request."""
        domains = domains or _DomainRule()
        self._policy.check_url(url)
        domains.check(url)
        key = PageCache.key(url, request.accept_language)
        entry = self._cache.get(key)
        if entry is not None and self._is_fresh(entry, request.max_age):
            return Loaded(
                entry.page,
                self._cache_info(entry, hit=True),
                RobotsInfo(allowed=True, source="cache"),
            )
        if not network:
            raise UpstreamError(
                "connect_failure", "not in the cache, and the network is switched off"
            )
        flight_key = f"{key}:{domains}:{crawl}:{request.store}"
        flight = self._flights.get(flight_key)
        if flight is None:
            flight = asyncio.create_task(self._load(url, key, entry, request, domains, crawl))
            self._flights[flight_key] = flight
            flight.add_done_callback(lambda done: self._landed(flight_key, done))
        # Another caller may wait on the same flight: one caller's timeout must not end it.
        return await asyncio.shield(flight)

    def _landed(self, key: str, flight: asyncio.Task[Loaded]) -> None:
        self._flights.pop(key, None)
        if not flight.cancelled():
            # Every waiter may have timed out; then nobody else looks at the failure.
            flight.exception()

    def _is_fresh(self, entry: CacheEntry, max_age: int) -> bool:
        now = self._clock()
        return now < entry.expires and now - entry.stored < max_age

    async def _load(
        self,
        url: urls.Url,
        key: str,
        entry: CacheEntry | None,
        request: FetchRequest,
        domains: _DomainRule,
        crawl: bool,
    ) -> Loaded:
        headers = entry.validators() if entry is not None else []
        if request.accept_language:
            headers.append(("Accept-Language", request.accept_language))
        robots = RobotsInfo(allowed=True, source="ignored")

        async def gate(hop: urls.Url) -> None:
            nonlocal robots
            self._policy.check_url(hop)
            domains.check(hop)
            robots = await self._check_robots(hop, crawl)

        try:
            async with asyncio.timeout(self._config.limits.total_seconds):
                page = await follow(
                    self._transport, url, headers, self._config.limits, gate=gate, get=self._get
                )
        except (UpstreamError, TimeoutError) as error:
            if entry is not None and self._clock() - entry.stored < STALE_IF_ERROR_SECONDS:
                return Loaded(entry.page, self._cache_info(entry, hit=True), robots, ("stale",))
            if isinstance(error, TimeoutError):
                raise UpstreamError("timeout", "the page took too long") from None
            raise
        if page.response.status == 304 and entry is not None:
            fresh = self._cache.refresh(key, entry, _ttl(request))
            return Loaded(fresh.page, self._cache_info(fresh, hit=True, revalidated=True), robots)
        stored = self._cache.put(key, page, _ttl(request)) if request.store else None
        info = CacheInfo(hit=False) if stored is None else self._cache_info(stored, hit=False)
        return Loaded(page, info, robots)

    async def _get(self, url: urls.Url, headers: Sequence[tuple[str, str]]) -> Response:
        async with self._slots.slot(url.host, min_interval=self._delays.get(url.host, 0.0)):
            response = await self._transport.get(url, headers)
        if response.status in (429, 503):
            wait = response.header("retry-after") or ""
            if wait.isdigit():
                self._slots.postpone(url.host, min(int(wait), _RETRY_AFTER_CAP_SECONDS))
        return response

    async def _check_robots(self, url: urls.Url, crawl: bool) -> RobotsInfo:
        policy = self._config.robots
        if policy == "ignore" or (policy == "respect_for_crawl_only" and not crawl):
            return RobotsInfo(allowed=True, source="ignored")
        info, rules = await self._robots.check(url)
        if rules.crawl_delay:
            if len(self._delays) >= MAX_HOSTS:
                self._delays.clear()
            self._delays[url.host] = min(rules.crawl_delay, _CRAWL_DELAY_CAP_SECONDS)
        if not info.allowed:
            raise RefusedError(
                "robots_disallowed", f"robots.txt of {url.host} does not allow this URL"
            )
        return info

    async def _get_robots(self, url: urls.Url) -> tuple[int, bytes]:
        page = await follow(
            self._transport, url, (), self._config.limits, max_redirects=_ROBOTS_REDIRECTS
        )
        return page.response.status, page.response.body

    async def _extract(self, page: Page, request: FetchRequest) -> Extraction:
        options = HtmlOptions(
            mode=request.mode,
            links=request.include_links,
            images=request.include_images,
            tables=request.include_tables,
            comments=request.include_comments,
            selector=request.selector,
            exclude_selector=request.exclude_selector,
        )
        response = page.response
        extraction = await self._pool.extract(
            response.body, str(page.final), response.header("content-type"), options
        )
        tag = (response.header("x-robots-tag") or "").lower()
        if "noindex" in tag or "none" in tag:
            extraction = replace(extraction, noindex=True)
        return extraction

    def _cache_info(self, entry: CacheEntry, *, hit: bool, revalidated: bool = False) -> CacheInfo:
        return CacheInfo(
            hit=hit,
            stored_at=_timestamp(entry.stored),
            age=max(0, int(self._clock() - entry.stored)),
            revalidated=revalidated,
            etag=entry.etag,
            expires=_timestamp(entry.expires),
        )

    def _response(
        self, request: FetchRequest, loaded: Loaded, extraction: Extraction, elapsed_ms: int
    ) -> FetchResponse:
        page = loaded.page
        markdown = extraction.content
        content = _format(request, extraction, page.response)
        limit = min(request.max_tokens or self._config.max_tokens, self._config.max_tokens)
        window = paginate(content, request.offset, limit)
        if not content.strip():
            raise ContentError("extraction_empty", "the page holds no readable text")
        if request.offset and not window.body:
            raise InvalidRequestError(
                "invalid_argument",
                f"offset {request.offset} is beyond the document's {window.total} tokens",
            )
        digest = hashlib.sha256(f"{page.final}\n{content}".encode()).hexdigest()
        return FetchResponse(
            id=f"f_{digest[:24]}",
            url=request.url,
            final_url=str(page.final),
            canonical_url=extraction.canonical_url,
            status=page.response.status,
            redirects=list(page.hops),
            content_type=extraction.content_type,
            charset=extraction.charset,
            charset_source=extraction.charset_source,
            title=extraction.title,
            author=extraction.author,
            site_name=extraction.site_name,
            language=extraction.language,
            published=extraction.published,
            modified=extraction.modified,
            description=extraction.description,
            content=window.text,
            format=request.format,
            page_type=extraction.page_type,
            tokens=TokenWindow(
                returned=window.returned,
                total=window.total,
                offset=request.offset,
                next_offset=window.next_offset,
                tokenizer=TOKENIZER,
            ),
            truncated=window.next_offset is not None,
            links=[Link(url=u, text=t) for u, t in extraction.links]
            if request.format == "links"
            else None,
            outline=outline(markdown) if request.format == "outline" else None,
            highlights=_highlights(markdown, request.query) if request.query else None,
            extraction=ExtractionInfo(
                engine=extraction.engine,
                version=extraction.version,
                quality=extraction.quality,
                warnings=[*loaded.warnings, *extraction.warnings],
            ),
            cache=loaded.cache,
            robots=loaded.robots,
            usage=Usage(billable=True, unit="fetch", quantity=1),
            elapsed_ms=elapsed_ms,
        )


@dataclass(frozen=True, slots=True)
class _DomainRule:
    """A caller's domain lists, checked for every hop."""

    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()

    def check(self, url: urls.Url) -> None:
        inside = not self.allowed or any(urls.domain_matches(url.host, d) for d in self.allowed)
        outside = any(urls.domain_matches(url.host, d) for d in self.blocked)
        if not inside or outside:
            raise RefusedError("forbidden", f"the caller's domain lists do not allow {url.host}")


def _ttl(request: FetchRequest) -> float:
    # max_age = 0 asks for revalidation now; what is stored may still serve other callers.
    return float(request.max_age or 86_400)


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _raise_for_status(response: Response) -> None:
    if response.status < 400 and response.status != 304:
        return
    missing = response.status in (404, 410)
    raise UpstreamError(
        "upstream_http",
        f"the page answered HTTP {response.status}",
        http_status=404 if missing else 502,
        retryable=response.status in (408, 425, 429, 500, 502, 503, 504),
        details={"status": response.status},
    )


def _refuse_challenge(response: Response, extraction: Extraction) -> None:
    mitigated = response.header("cf-mitigated") == "challenge"
    short = len(extraction.content) < _CHALLENGE_CHARS
    if mitigated or (
        short and _CHALLENGE.search(f"{extraction.title or ''}\n{extraction.content}")
    ):
        raise ContentError(
            "challenge_page", "a bot or consent wall was returned instead of the page"
        )


def _format(request: FetchRequest, extraction: Extraction, response: Response) -> str:
    markdown = extraction.content
    if request.format == "text":
        return to_text(markdown)
    if request.format == "html":
        return to_html(markdown)
    if request.format == "raw_text":
        return decode_text(response.body, response.header("content-type"))[0]
    if request.format == "outline":
        return "".join(f"{'  ' * (e.level - 1)}- {e.title}\n" for e in outline(markdown))
    if request.format == "links":
        return "".join(f"- [{text}]({link})\n" for link, text in extraction.links)
    return markdown


def _highlights(markdown: str, query: str) -> list[Highlight]:
    """The three paragraphs that hold most of the query's terms, best first."""
    from deepinfer_search_fetch.index.analyzers import terms

    wanted = set(terms(query))
    scored: list[tuple[float, int, str]] = []
    for number, block in enumerate(to_text(markdown).split("\n\n")):
        text = " ".join(block.split())
        found = wanted.intersection(terms(text))
        if found:
            scored.append(
                (len(found) / len(wanted) - 0.001 * count_tokens(text) ** 0.5, number, text)
            )
    best = sorted(scored, key=lambda item: (-item[0], item[1]))[:3]
    return [Highlight(text=text[:600], score=round(max(score, 0.0), 4)) for score, _, text in best]
