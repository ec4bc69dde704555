"""The library's face: `AsyncSearchFetch`, and `SearchFetch` for code without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.admission import WorkThreads
from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.database import private_folder
from deepinfer_search_fetch.errors import InvalidRequestError, LimitError, SearchFetchError
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.fetching import Fetcher
from deepinfer_search_fetch.index.backend import SearchBackend
from deepinfer_search_fetch.index.ingest import Ingester, Source, SourceKind
from deepinfer_search_fetch.index.sources.crawl import CrawlOptions
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.loading import Loaded
from deepinfer_search_fetch.models import (
    BatchItem,
    FetchRequest,
    FetchResponse,
    IngestReport,
    SearchRequest,
    SearchResponse,
)
from deepinfer_search_fetch.net.politeness import PATIENT
from deepinfer_search_fetch.net.resolver import Resolver
from deepinfer_search_fetch.search.dense import Embedder
from deepinfer_search_fetch.search.engine import search
from deepinfer_search_fetch.search.parts import parts_of
from deepinfer_search_fetch.search.upstream import UpstreamEngine

_T = TypeVar("_T")


class AsyncSearchFetch:
    """Fetch and Search over one home folder. Use as an async context manager, or `close()` it.

    resolver, backend: replaceable parts (tests, another index). upstreams: search engines that
    `sources` of a request may name as "upstream:NAME". embed: vectors for the re-ranker.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        resolver: Resolver | None = None,
        backend: SearchBackend | None = None,
        upstreams: Mapping[str, UpstreamEngine] | None = None,
        embed: Embedder | None = None,
    ) -> None:
        self.config = config or Config()
        private_folder(self.config.home)
        self.fetcher = Fetcher(self.config, resolver=resolver)
        if self.config.index_fetched:
            self.fetcher.observer = self._index_fetched
        self._backend = backend
        self._parts = parts_of(self.config, upstreams, embed)
        threads = self.config.search_threads
        # Searches share the interpreter: each one at work makes all others slower.
        self._searches = WorkThreads(
            "search", threads, per_client=max(1, threads - 1), kept=(threads + 1) // 2
        )
        self._index_threads = WorkThreads("the index", 1)
        self._write_turn = asyncio.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def backend(self) -> SearchBackend:
        """The index, opened on first use."""
        if self._backend is None:
            self._backend = TantivyBackend(self.config.home / "index")
        return self._backend

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End worker processes and close the cache; what is asked for afterwards, or is on its way,
        is an InvalidRequestError."""
        self._closed = True
        await self.fetcher.close()
        self._searches.close()
        self._index_threads.close()

    async def warm(self) -> None:
        """Start what the first request would have to wait for."""
        await self.fetcher.pool.warm()

    @contextlib.contextmanager
    def _in_use(self) -> Generator[None]:
        if self._closed:
            raise _closed()
        try:
            yield
        except SearchFetchError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise _closed() from None  # by `close`, not by who waits here
            raise
        except Exception as error:
            if self._closed:  # its files went away underneath
                raise _closed() from error
            raise

    async def fetch(
        self,
        request: FetchRequest,
        *,
        allowed_domains: Sequence[str] = (),
        blocked_domains: Sequence[str] = (),
        network: bool = True,
    ) -> FetchResponse:
        """One URL as clean Markdown. Raises SearchFetchError.

        allowed_domains, blocked_domains hold for every redirect; network=False: cache only. They
        stand here or in the request.
        """
        request = with_rules(request, allowed_domains, blocked_domains, network=network)
        with self._in_use():
            return await self.fetcher.fetch(
                request,
                allowed_domains=request.allowed_domains,
                blocked_domains=request.blocked_domains,
                network=not request.cache_only,
            )

    async def fetch_many(
        self, requests: Sequence[FetchRequest], *, concurrency: int = 4
    ) -> AsyncIterator[BatchItem]:
        """Items in completion order; `index` says which request each one answers.

        Requests that differ in nothing but the spelling of the URL (tracking parameters, order of
        the query) are fetched once.

        Raises InvalidRequestError for an argument that cannot be used.
        """
        if concurrency < 1:
            raise InvalidRequestError(
                "invalid_argument", f"concurrency must be at least 1, got {concurrency}"
            )
        turn = asyncio.Semaphore(concurrency)
        running: dict[str, asyncio.Task[FetchResponse]] = {}

        async def fetched(request: FetchRequest) -> FetchResponse:
            async with turn:
                PATIENT.set(True)
                return await self.fetch(request)

        async def one(index: int, request: FetchRequest) -> BatchItem:
            try:
                url = urls.canonical(urls.parse(request.url))
                key = url + request.model_dump_json(exclude={"url"})
                task = running.get(key) or asyncio.create_task(fetched(request))
                running[key] = task
                response = await task
            except SearchFetchError as error:
                return BatchItem(index=index, ok=False, error=error.body()["error"])
            own = response.model_copy(update={"url": request.url}, deep=True)
            return BatchItem(index=index, ok=True, response=own)

        tasks = [asyncio.create_task(one(i, r)) for i, r in enumerate(requests)]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in (*tasks, *running.values()):
                task.cancel()

    async def search(self, request: SearchRequest) -> SearchResponse:
        """Ranked results from the index. Runs in a thread; the event loop stays free."""
        with self._in_use():
            return await self._searches.run(search, self.backend, request, parts=self._parts)

    async def ingest(
        self,
        source: str | Path,
        kind: SourceKind | None = None,
        *,
        crawl: CrawlOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> IngestReport:
        """Bring a source into the index: a page, a file or folder, JSON lines, a web archive, a
        sitemap, a feed, or everything a crawl finds.

        kind: guessed from `source` when None (".xml" URLs are sitemaps; "feed" and "crawl" are
        never guessed). crawl: limits of a crawl. progress: called with (seen, written).

        Raises InvalidRequestError for an argument that cannot be used.
        """
        location = str(source)
        if not location.strip():  # as a path it would be the current folder
            raise InvalidRequestError("invalid_argument", "the source to ingest is empty")
        with self._in_use():
            return await self._ingest(location, kind, crawl, progress)

    async def _ingest(
        self,
        location: str,
        kind: SourceKind | None,
        crawl: CrawlOptions | None,
        progress: Callable[[int, int], None] | None,
    ) -> IngestReport:
        chosen = Source(kind or guess_kind(location), location, crawl or CrawlOptions())
        async with self._write_turn:
            ingester = Ingester(
                self.backend,
                self.fetcher,
                home=self.config.home,
                pool=self.fetcher.pool,
                threads=self._index_threads,
                progress=progress,
            )
            return await ingester.run(chosen)

    async def _index_fetched(self, loaded: Loaded, extraction: Extraction) -> None:
        """Take what was fetched into the index; a busy index leaves it out."""
        async with self._write_turn:
            ingester = Ingester(self.backend, threads=self._index_threads)
            with contextlib.suppress(LimitError):
                await ingester.take_fetched(loaded, extraction)
                await self._index_threads.run(self.backend.commit)


class SearchFetch:
    """`AsyncSearchFetch` for synchronous code: same methods, plain return values."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        resolver: Resolver | None = None,
        upstreams: Mapping[str, UpstreamEngine] | None = None,
        embed: Embedder | None = None,
    ) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncSearchFetch(config, resolver=resolver, upstreams=upstreams, embed=embed)

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
        """See `AsyncSearchFetch.close`."""
        if not self._client.closed:
            self._run(self._client.close())
            self._runner.close()

    def fetch(self, request: FetchRequest) -> FetchResponse:
        """See `AsyncSearchFetch.fetch`."""
        return self._run(self._client.fetch(request))

    def fetch_many(
        self, requests: Sequence[FetchRequest], *, concurrency: int = 4
    ) -> Iterator[BatchItem]:
        """See `AsyncSearchFetch.fetch_many`."""

        async def collect() -> list[BatchItem]:
            return [i async for i in self._client.fetch_many(requests, concurrency=concurrency)]

        yield from self._run(collect())

    def search(self, request: SearchRequest) -> SearchResponse:
        """See `AsyncSearchFetch.search`."""
        return self._run(self._client.search(request))

    def ingest(
        self,
        source: str | Path,
        kind: SourceKind | None = None,
        *,
        crawl: CrawlOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> IngestReport:
        """See `AsyncSearchFetch.ingest`."""
        return self._run(self._client.ingest(source, kind, crawl=crawl, progress=progress))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._client.closed:
            work.close()
            raise _closed()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(work)
        work.close()
        raise InvalidRequestError(
            "invalid_argument", "SearchFetch was called inside an event loop; use AsyncSearchFetch"
        )


def _closed() -> InvalidRequestError:
    return InvalidRequestError("invalid_argument", "this client is closed; make a new one")


def with_rules(
    request: FetchRequest,
    allowed_domains: Sequence[str],
    blocked_domains: Sequence[str],
    *,
    network: bool,
) -> FetchRequest:
    """The request with further rules. Raises InvalidRequestError for two lists of allowed domains:
    which of them should hold is not for us to guess."""
    if request.allowed_domains and allowed_domains:
        raise InvalidRequestError(
            "invalid_argument", "allowed_domains are given twice: in the request and beside it"
        )
    return request.model_copy(
        update={
            "allowed_domains": [*request.allowed_domains, *allowed_domains],
            "blocked_domains": [*request.blocked_domains, *blocked_domains],
            "cache_only": request.cache_only or not network,
        }
    )


def guess_kind(location: str) -> SourceKind:
    """The kind of source a location most likely is."""
    if location.startswith(("http://", "https://")):
        path = location.partition("?")[0].lower()
        return "sitemap" if path.endswith((".xml", ".xml.gz")) else "url"
    if location.endswith((".warc", ".warc.gz", ".warc.zst")):
        return "warc"
    return "jsonl" if location.endswith((".jsonl", ".jsonl.gz")) else "file"
