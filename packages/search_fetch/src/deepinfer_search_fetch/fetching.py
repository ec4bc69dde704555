"""The fetch pipeline: load, render if the page needs it, extract, judge, answer."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.admission import WorkThreads
from deepinfer_search_fetch.answering import build_response
from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.documents import DocumentCache
from deepinfer_search_fetch.errors import (
    ContentError,
    InvalidRequestError,
    SearchFetchError,
    UpstreamError,
)
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.extract.document import Document, Job
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.extract.pool import ExtractPool
from deepinfer_search_fetch.loading import DomainRule, Loaded, PageLoader
from deepinfer_search_fetch.models import FetchRequest, FetchResponse, Format, Highlight
from deepinfer_search_fetch.net.cache import PageCache
from deepinfer_search_fetch.net.chain import Page
from deepinfer_search_fetch.net.charset import decode_text
from deepinfer_search_fetch.net.dial import Dialer
from deepinfer_search_fetch.net.guard import AddressPolicy
from deepinfer_search_fetch.net.resolver import Resolver, SystemResolver
from deepinfer_search_fetch.net.robots import robots_directives
from deepinfer_search_fetch.net.transport import Response, Transport, body_digest
from deepinfer_search_fetch.render.base import Renderer, RenderJob
from deepinfer_search_fetch.render.chromium import ChromiumRenderer
from deepinfer_search_fetch.verdicts import failure_of, refuse_what_is_no_page

_REMEMBERED_DOCUMENTS = 10_000
_DECODERS = 4
# What a rendered page keeps of the headers of the page it was made from.
_KEPT_HEADERS = frozenset(
    {"cache-control", "expires", "set-cookie", "vary", "x-robots-tag", "cf-mitigated"}
)


class Fetcher:
    """Fetches, caches and extracts; one per service.

    resolver, policy, clock and renderer are replaceable for tests and other set-ups. observer:
    called with every page that `fetch` read and may store.
    """

    def __init__(
        self,
        config: Config,
        *,
        resolver: Resolver | None = None,
        policy: AddressPolicy | None = None,
        clock: Callable[[], float] = time.time,
        renderer: Renderer | None = None,
    ) -> None:
        self._config = config
        policy = policy or AddressPolicy.from_config(config)
        resolver = resolver or SystemResolver(config.limits.dns_seconds)
        proxy = config.proxy
        self._threads = WorkThreads("decoding", _DECODERS, per_client=2, per_host=2, kept=1)
        transport = Transport(
            policy, resolver, config.limits, config.user_agent, proxy=proxy, threads=self._threads
        )
        self._loader = PageLoader(config, transport, policy, clock)
        self._renderer = renderer or ChromiumRenderer(
            config, Dialer(policy, resolver, config.limits, proxy)
        )
        self.pool = ExtractPool(config.extract_workers, config.limits)
        self._documents = DocumentCache(config.document_cache_bytes)
        self.observer: Callable[[Loaded, Extraction], Awaitable[None]] | None = None
        self._served: OrderedDict[str, str] = OrderedDict()

    async def close(self) -> None:
        await self._loader.close()
        await self._renderer.close()
        await self.pool.close()
        self._threads.close()

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
        domains = DomainRule(tuple(allowed_domains), tuple(blocked_domains))
        seconds = min(request.timeout, self._config.limits.total_seconds)
        highlights: list[Highlight] | None = None
        try:
            async with asyncio.timeout(seconds):
                loaded, document = await self._read(request, domains, seconds, network, crawl)
                if request.query:
                    whole = await self._document(loaded.page, request, "markdown")
                    highlights = await self.pool.highlights(whole.content, request.query)
        except TimeoutError:
            raise _timeout(seconds) from None
        if self.observer is not None and request.store:
            await self.observer(loaded, document.extraction)
        elapsed = int((time.monotonic() - started) * 1000)
        response = build_response(
            request, loaded, document, highlights, self._config.max_tokens, elapsed
        )
        self._note_changes(request, response)
        return response

    async def read(
        self, request: FetchRequest, *, crawl: bool = False
    ) -> tuple[Loaded, Extraction]:
        """What `fetch` makes its response of: the page as it came and what was extracted."""
        seconds = min(request.timeout, self._config.limits.total_seconds)
        try:
            async with asyncio.timeout(seconds):
                loaded, document = await self._read(request, DomainRule(), seconds, True, crawl)
        except TimeoutError:
            raise _timeout(seconds) from None
        return loaded, document.extraction

    async def _read(
        self,
        request: FetchRequest,
        domains: DomainRule,
        seconds: float,
        network: bool,
        crawl: bool,
    ) -> tuple[Loaded, Document]:
        started = time.monotonic()
        problem = self._renderer.problem()
        forced = request.render == "always" or request.wait_for is not None
        if request.wait_for is not None and request.render == "never":
            raise InvalidRequestError(
                "invalid_argument", "wait_for needs the renderer, but render is 'never'"
            )
        if forced and problem is not None:
            raise ContentError("feature_unavailable", f"rendering is not available: {problem}")
        url = urls.parse(request.url)
        loaded = await self.load(url, request, domains=domains, network=network, crawl=crawl)
        for hop in loaded.page.hops:  # a cached page was fetched under other rules
            domains.check(urls.parse(hop.to_url))
        failure = failure_of(loaded.page.response)
        if failure is not None:
            raise failure
        document = None if forced else await self._document(loaded.page, request, request.format)
        if document is None or (
            request.render == "auto" and problem is None and network and document.scripted
        ):
            left = seconds - (time.monotonic() - started)
            loaded, document = await self._draw(loaded, request, document, domains, crawl, left)
        refuse_what_is_no_page(loaded.page.response, document.extraction)
        if document.extraction.noarchive:
            await self._loader.forget(_cache_key(url, request, loaded.rendered))
        return loaded, document

    async def load(
        self,
        url: urls.Url,
        request: FetchRequest,
        *,
        domains: DomainRule | None = None,
        network: bool = True,
        crawl: bool = False,
    ) -> Loaded:
        """The page's bytes from the cache or the network; identical loads share one request."""
        return await self._loader.load(url, request, domains=domains, network=network, crawl=crawl)

    async def _draw(
        self,
        plain: Loaded,
        request: FetchRequest,
        document: Document | None,
        domains: DomainRule,
        crawl: bool,
        seconds: float,
    ) -> tuple[Loaded, Document]:
        """The rendered page; what was extracted without it where rendering was only a try."""
        try:
            drawn = await self._rendered(plain, request, domains, crawl, seconds)
            domains.check(drawn.page.final)
            better = await self._document(drawn.page, request, request.format)
        except SearchFetchError as error:
            if document is None:
                raise
            warnings = (*plain.warnings, f"render_failed:{error.code}")
            return replace(plain, warnings=warnings), document
        if document is not None and len(better.content) < len(document.content):
            return plain, document
        return drawn, better

    async def _rendered(
        self, plain: Loaded, request: FetchRequest, domains: DomainRule, crawl: bool, seconds: float
    ) -> Loaded:
        url = plain.page.requested
        key = _cache_key(url, request, rendered=True)
        entry = await self._loader.cached(key, request.max_age)
        if entry is not None and plain.cache.hit:
            return self._loader.from_cache(entry, rendered=True)

        async def work() -> Loaded:
            response = plain.page.response
            text, _, _ = await self._threads.run(
                decode_text, response.body, response.header("content-type")
            )
            job = RenderJob(
                plain.page.final,
                text,
                self._loader.gate(domains, crawl),
                min(self._config.render_seconds, max(seconds, 1.0)),
                request.wait_for,
                request.accept_language,
            )
            made = await self._renderer.render(job)
            kept = tuple(h for h in response.headers if h[0] in _KEPT_HEADERS)
            body = made.html.encode("utf-8", "replace")
            digest = await self._threads.run(body_digest, body)
            page = Page(
                url,
                Response(
                    made.url,
                    made.status,
                    (*kept, ("content-type", "text/html; charset=utf-8")),
                    body,
                    response.wire_bytes,
                    digest=digest,
                ),
                plain.page.hops,
            )
            failure = failure_of(page.response)
            if failure is not None:
                raise failure
            info = await self._loader.store(key, page, request)
            return Loaded(page, info, plain.robots, made.warnings, rendered=True)

        return await self._loader.share(f"{key}:{domains}:{crawl}:{request.store}", work)

    async def _document(self, page: Page, request: FetchRequest, form: Format) -> Document:
        """The page read and written in a format; made once for all who ask for the same."""
        response = page.response
        options = HtmlOptions(
            mode=request.mode,
            links=request.include_links,
            images=request.include_images,
            tables=request.include_tables,
            comments=request.include_comments,
            selector=request.selector,
            exclude_selector=request.exclude_selector,
            page_marks=request.include_pages,
        )
        job = Job(str(page.final), response.header("content-type"), options, form)
        key = DocumentCache.key(response.digest, job)
        document = self._documents.get(key)
        if document is None:
            document = await self.pool.extract(response.body, job)
            self._documents.put(key, document)
        directives = robots_directives(response.headers)
        extraction = document.extraction
        return replace(
            document,
            extraction=replace(
                extraction,
                noindex=extraction.noindex or "noindex" in directives,
                noarchive=extraction.noarchive or "noarchive" in directives,
            ),
        )

    def _note_changes(self, request: FetchRequest, response: FetchResponse) -> None:
        """A warning when a later page of a document belongs to another text than the first."""
        wishes = request.model_dump_json(exclude={"offset", "max_tokens", "max_age", "timeout"})
        if request.offset == 0:
            self._served[wishes] = response.id
            self._served.move_to_end(wishes)
            if len(self._served) > _REMEMBERED_DOCUMENTS:
                self._served.popitem(last=False)
        elif self._served.get(wishes, response.id) != response.id:
            response.extraction.warnings.append("content_changed")


def _timeout(seconds: float) -> UpstreamError:
    return UpstreamError(
        "timeout",
        f"not finished within {seconds:g} seconds",
        details={"limit": "timeout", "value": seconds},
    )


def _cache_key(url: urls.Url, request: FetchRequest, rendered: bool) -> str:
    rendering = f"rendered:{request.wait_for!r}" if rendered else ""
    return PageCache.key(url, request.accept_language, rendering)
