"""Bringing pages into the index: URLs, files, JSON lines, WARC, sitemaps, feeds, crawls.

Idempotent: a page whose visible content did not change is not written again. Every address goes
through the fetcher, and with it through its guard, robots.txt and politeness.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.admission import WorkThreads
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.extract.document import Job
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.extract.pool import ExtractPool
from deepinfer_search_fetch.fetching import Fetcher
from deepinfer_search_fetch.index.authority import AuthorityTable
from deepinfer_search_fetch.index.backend import SearchBackend
from deepinfer_search_fetch.index.dedupe import HostLines, fingerprint
from deepinfer_search_fetch.index.document import MAX_STORED_CHARS, IndexedPage
from deepinfer_search_fetch.index.linkgraph import LinkGraph
from deepinfer_search_fetch.index.links import PageLink, PageLinks, page_links
from deepinfer_search_fetch.index.sources.crawl import Crawl, CrawlOptions
from deepinfer_search_fetch.index.sources.files import read_files, read_jsonl
from deepinfer_search_fetch.index.sources.item import Item, RawDocument, Skip, timestamp
from deepinfer_search_fetch.index.sources.warc import read_warc
from deepinfer_search_fetch.index.sources.xml import Entry, parse_feed, parse_sitemap
from deepinfer_search_fetch.loading import Loaded
from deepinfer_search_fetch.models import FetchRequest, IngestReport
from deepinfer_search_fetch.net.charset import decode_text

_T = TypeVar("_T")
SourceKind = Literal["url", "file", "jsonl", "warc", "sitemap", "feed", "crawl"]
SOURCE_KINDS: tuple[SourceKind, ...] = (
    "url", "file", "jsonl", "warc", "sitemap", "feed", "crawl",
)  # fmt: skip
MAX_SITEMAP_URLS = 50_000
MAX_SITEMAPS = 200
_COMMIT_EVERY = 2000
_AT_ONCE = 8  # pages on their way; the politeness towards each site is the fetcher's
_BATCH = 64  # lines or files read in one visit to the index thread


@dataclass(frozen=True, slots=True)
class Source:
    """What to ingest. location: a URL, or a path for `file` (a folder is walked), `jsonl` and
    `warc`. crawl: limits of a `crawl`."""

    kind: SourceKind
    location: str
    crawl: CrawlOptions = field(default_factory=CrawlOptions)


class Ingester:
    """Writes into `backend`.

    fetcher: needed for what comes from the network. home: folder of the link graph and of crawls
    that were interrupted; without it there is no graph, and no `crawl`. pool: extracts files and
    archives in processes of their own, None in this one. threads: where text is analysed and
    written, one thread of it at a time. progress: called there with (seen, written).
    """

    def __init__(
        self,
        backend: SearchBackend,
        fetcher: Fetcher | None = None,
        *,
        home: Path | None = None,
        pool: ExtractPool | None = None,
        threads: WorkThreads | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._backend = backend
        self._fetcher = fetcher
        self._home = home
        self._pool = pool
        self._threads = threads or WorkThreads("the index", 1)
        self._progress = progress
        self._counts: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._taken: set[str] = set()
        self._lines = HostLines()
        self._graph: LinkGraph | None = None

    async def run(self, source: Source) -> IngestReport:
        """Ingest one source; what fails is counted by reason and does not stop the rest."""
        if self._home is not None and source.kind not in ("file", "jsonl"):
            self._graph = LinkGraph(self._home / "links.sqlite3")
        try:
            if source.kind == "url":
                await self._visit(Entry(source.location))
            elif source.kind == "sitemap":
                await self._side_by_side(self._visit, self._sitemap(source.location))
            elif source.kind == "feed":
                await self._side_by_side(self._visit, self._feed(source.location))
            elif source.kind == "crawl":
                await self._crawl(source)
            else:
                await self._read_local(source)
            if self._graph is not None:
                await self._threads.run(self._write_anchors, self._graph)
        finally:
            if self._graph is not None:
                self._graph.close()
                self._graph = None
        return self.report(await self._threads.run(self._backend.commit))

    async def _side_by_side(
        self, work: Callable[[_T], Awaitable[object]], items: AsyncIterator[_T]
    ) -> None:
        """`work` on all items, a few at once; the first unexpected failure ends the rest."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(item: _T) -> None:
            try:
                await work(item)
            finally:
                places.release()

        try:
            async with asyncio.TaskGroup() as group:
                async for item in items:
                    await places.acquire()
                    group.create_task(one(item))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def report(self, generation: int) -> IngestReport:
        """What was done so far."""
        return IngestReport(
            seen=self._counts["seen"],
            indexed=self._counts["indexed"],
            updated=self._counts["updated"],
            unchanged=self._counts["unchanged"],
            duplicate=self._counts["duplicate"],
            skipped=dict(sorted(self._skipped.items())),
            failed=dict(sorted(self._failed.items())),
            generation=generation,
        )

    def add(self, page: IndexedPage) -> None:
        """Write one page unless the same content is there already."""
        self._count("seen")
        if page.doc_id in self._taken:
            self._count("duplicate")
            return
        self._taken.add(page.doc_id)
        old = self._backend.get(page.doc_id)
        first_seen = page.fetched_at if old is None else (old.first_seen or old.fetched_at)
        anchors = page.anchors or (old.anchors if old is not None else "")
        page = replace(page, first_seen=first_seen, anchors=anchors)
        if old is not None and old.content_hash == page.content_hash:
            self._count("unchanged")
            return
        self._lines.see(page.host, page.content[:MAX_STORED_CHARS])
        boilerplate = self._lines.boilerplate(page.host)
        if boilerplate is not None:
            print_ = fingerprint(page.content[:MAX_STORED_CHARS], boilerplate)
            page = replace(page, fingerprint=astuple(print_))
        self._backend.index([page])
        self._count("updated" if old is not None else "indexed")
        if (self._counts["indexed"] + self._counts["updated"]) % _COMMIT_EVERY == 0:
            self._backend.commit()

    async def take_fetched(self, loaded: Loaded, extraction: Extraction) -> tuple[PageLink, ...]:
        """`add_fetched`, away from the event loop."""
        return await self._threads.run(self.add_fetched, loaded, extraction)

    def add_fetched(self, loaded: Loaded, extraction: Extraction) -> tuple[PageLink, ...]:
        """Index a fetched page and store its links in the graph; returns the links.

        A page that says noindex is not indexed, and leaves the index if it was there.
        """
        response = loaded.page.response
        found = PageLinks()
        if extraction.content_type == "text/html":
            text, _, _ = decode_text(response.body, response.header("content-type"), markup=True)
            tag = (response.header("x-robots-tag") or "").lower()
            found = page_links(text, loaded.page.final, nofollow="nofollow" in tag)
        url = urls.canonical(loaded.page.final)
        if self._graph is not None:
            network = _network(response.peer)
            self._graph.add_page(url, loaded.page.final.host, found, network)
        page = _page(extraction, url, loaded.cache.stored_at or timestamp(), url)
        self._add_unless_noindex(page, extraction)
        return found.links

    def _add_unless_noindex(self, page: IndexedPage, extraction: Extraction) -> None:
        if not extraction.noindex:
            self.add(page)
            return
        self._take(Skip("noindex"))
        self._backend.delete([page.doc_id])

    def _take(self, skip: Skip) -> None:
        (self._failed if skip.failed else self._skipped)[skip.reason] += 1
        self._count("seen")

    def _count(self, name: str) -> None:
        self._counts[name] += 1
        if self._progress is not None and name == "seen":
            self._progress(self._counts["seen"], self._counts["indexed"] + self._counts["updated"])

    async def _read_local(self, source: Source) -> None:
        readers: dict[str, Callable[[Path], Iterator[Item]]] = {
            "file": read_files, "jsonl": read_jsonl, "warc": read_warc,
        }  # fmt: skip
        reader = readers[source.kind](Path(source.location))

        async def documents() -> AsyncIterator[RawDocument]:
            more = True
            while more:
                found, more = await self._threads.run(self._take_batch, reader)
                for document in found:
                    yield document

        await self._side_by_side(self._add_document, documents())

    def _take_batch(self, reader: Iterator[Item]) -> tuple[list[RawDocument], bool]:
        """Index the pages of the next items; returns those to extract, and whether more come."""
        found: list[RawDocument] = []
        size = 0
        for item in islice(reader, _BATCH):
            size += 1
            if isinstance(item, Skip):
                self._take(item)
            elif isinstance(item, IndexedPage):
                self.add(item)
            else:
                found.append(item)
                break  # documents may be large: one at a time is held
        return found, bool(found) or size == _BATCH

    async def _add_document(self, document: RawDocument) -> None:
        web = document.url.startswith("http")
        try:
            extraction = await self._extract(document, document.url if web else "")
        except SearchFetchError as error:
            self._take(Skip(error.code, failed=True))
            return
        if not extraction.content.strip():
            self._take(Skip("extraction_empty"))
            return
        await self._threads.run(self._add_extracted, document, extraction, web)

    def _add_extracted(self, document: RawDocument, extraction: Extraction, web: bool) -> None:
        url = urls.canonical(urls.parse(document.url)) if web else document.url
        if web and self._graph is not None and extraction.content_type == "text/html":
            base = urls.parse(document.url)
            text, _, _ = decode_text(document.body, document.content_type, markup=True)
            self._graph.add_page(url, base.host, page_links(text, base))
        page = _page(extraction, url, document.fetched_at, document.name)
        self._add_unless_noindex(page, extraction)

    async def _extract(self, document: RawDocument, url: str) -> Extraction:
        if self._pool is not None:
            job = Job(url, document.content_type, HtmlOptions())
            return (await self._pool.extract(document.body, job)).extraction
        from deepinfer_search_fetch.extract.dispatch import extract_document

        return await self._threads.run(
            extract_document, document.body, url or None, document.content_type, HtmlOptions()
        )

    async def _visit(self, entry: Entry) -> tuple[PageLink, ...]:
        if entry.modified and await self._threads.run(self._is_newer, entry):
            self._take(Skip("not_modified"))
            return ()
        try:
            request = FetchRequest(url=entry.url, max_tokens=None, render="never")
            if entry.modified:  # it changed, says the sitemap, so a cached copy will not do
                request.max_age = 0
            loaded, extraction = await self._network().read(request, crawl=True)
        except SearchFetchError as error:
            self._take(Skip(error.code, failed=error.code != "robots_disallowed"))
            return ()
        except ValueError:
            self._take(Skip("invalid_url", failed=True))
            return ()
        if not extraction.content.strip():
            self._take(Skip("extraction_empty"))
            return ()
        if entry.published and not extraction.published:
            extraction = replace(extraction, published=entry.published)
        return await self.take_fetched(loaded, extraction)

    def _is_newer(self, entry: Entry) -> bool:
        """Whether the index read this page after the sitemap says it last changed."""
        try:
            url = urls.canonical(urls.parse(entry.url))
        except SearchFetchError:
            return False
        known = self._backend.get(IndexedPage(url, "", "", "").doc_id)
        # A plain day compares as its first second, so a change later that day is read once more.
        return (
            known is not None
            and entry.modified is not None
            and (known.fetched_at[: len(entry.modified)] > entry.modified)
        )

    async def _load(self, location: str) -> Loaded:
        loaded = await self._network().load(urls.parse(location), FetchRequest(url=location))
        if loaded.page.response.status != 200:
            raise InvalidRequestError(
                "not_found", f"{location} answered HTTP {loaded.page.response.status}"
            )
        return loaded

    async def _sitemap(self, location: str) -> AsyncIterator[Entry]:
        """Pages of a sitemap or sitemap index, each once."""
        queue = [location]
        read: set[str] = set()
        found: set[str] = set()
        while queue and len(read) < MAX_SITEMAPS:
            current = queue.pop(0)
            if current in read:
                continue
            read.add(current)
            try:
                body = (await self._load(current)).page.response.body
                nested, pages = await self._threads.run(parse_sitemap, body)
            except (SearchFetchError, ValueError) as error:
                code = getattr(error, "code", "invalid_url")
                self._take(Skip(f"sitemap_{code}", failed=True))
                continue
            queue += [entry.url for entry in nested]
            for page in pages:
                if page.url not in found and len(found) < MAX_SITEMAP_URLS:
                    found.add(page.url)
                    yield page

    async def _feed(self, location: str) -> AsyncIterator[Entry]:
        page = (await self._load(location)).page
        for entry in await self._threads.run(parse_feed, page.response.body, page.final):
            yield entry

    async def _crawl(self, source: Source) -> None:
        if self._home is None:
            raise InvalidRequestError("invalid_argument", "a crawl needs a home folder")

        async def visit(url: str) -> tuple[PageLink, ...]:
            return await self._visit(Entry(url))

        await Crawl(
            self._home / "crawls",
            source.location,
            source.crawl,
            AuthorityTable(self._home / "authority.sqlite3"),
            visit,
            lambda: self._threads.run(self._backend.commit),
        ).run()

    def _write_anchors(self, graph: LinkGraph) -> None:
        """Pages that are indexed get the texts of links to them."""
        self._backend.commit()
        for url in graph.stale():
            page = self._backend.get(IndexedPage(url, "", "", "").doc_id)
            if page is None:
                continue
            anchors = graph.anchors(url)
            if anchors != page.anchors:
                self._backend.index([replace(page, anchors=anchors)])
        self._backend.commit()
        graph.settled()

    def _network(self) -> Fetcher:
        if self._fetcher is None:
            raise InvalidRequestError(
                "invalid_argument", "this ingester was made without a fetcher"
            )
        return self._fetcher


def _page(extraction: Extraction, url: str, fetched_at: str, name: str) -> IndexedPage:
    """An extraction as it is indexed, under its canonical URL where that is of the same site."""
    canonical = extraction.canonical_url
    if canonical and canonical.startswith("http"):
        try:
            target = urls.parse(canonical)
            same = not url.startswith("http") or (
                urls.registrable_domain(target.host)
                == urls.registrable_domain(urls.parse(url).host)
            )
            url = urls.canonical(target) if same else url
        except SearchFetchError:
            pass
    return IndexedPage(
        url=url,
        title=extraction.title or name,
        content=extraction.content,
        fetched_at=fetched_at,
        language=extraction.language,
        published=extraction.published,
        site_name=extraction.site_name,
        page_type=extraction.page_type,
    )


def _network(address: str) -> str:
    """The /24 of an IPv4 address, the /48 of an IPv6 one, "" for none."""
    if ":" in address:
        return str(ipaddress.ip_network(f"{address}/48", strict=False))
    return address.rpartition(".")[0]
