"""Bytes of a page: cache, robots.txt, host slot, guarded chain; no extraction."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from filelock import FileLock, Timeout

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.admission import WorkThreads
from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.errors import RefusedError, SearchFetchError, UpstreamError
from deepinfer_search_fetch.models import CacheInfo, FetchRequest, RobotsInfo
from deepinfer_search_fetch.net.cache import (
    MAX_TTL_SECONDS,
    STALE_IF_ERROR_SECONDS,
    CacheEntry,
    PageCache,
    delta_seconds,
)
from deepinfer_search_fetch.net.chain import Gate, Page, follow
from deepinfer_search_fetch.net.guard import AddressPolicy
from deepinfer_search_fetch.net.politeness import HostSlots
from deepinfer_search_fetch.net.robots import (
    MAX_HOSTS,
    OriginError,
    RobotsCache,
    Rules,
    read_robots,
)
from deepinfer_search_fetch.net.transport import Response, Transport
from deepinfer_search_fetch.verdicts import failure_of

_ROBOTS_REDIRECTS = 5
_RETRY_AFTER_CAP_SECONDS = 300
_CRAWL_DELAY_CAP_SECONDS = 60.0
_LOCK_POLL_SECONDS = 0.05
_CACHE_THREADS = 4
_NO_CONNECTION = frozenset(
    {"dns_failure", "connect_failure", "tls_failure", "blocked_address", "blocked_port"}
)
_STALE_STATUSES = frozenset({500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A page and how it was obtained; `rendered` if a browser made its body."""

    page: Page
    cache: CacheInfo
    robots: RobotsInfo
    warnings: tuple[str, ...] = ()
    rendered: bool = False


@dataclass(frozen=True, slots=True)
class DomainRule:
    """A caller's domain lists, checked for every hop."""

    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()

    def check(self, url: urls.Url) -> None:
        inside = not self.allowed or any(urls.domain_matches(url.host, d) for d in self.allowed)
        outside = any(urls.domain_matches(url.host, d) for d in self.blocked)
        if not inside or outside:
            raise RefusedError("forbidden", f"the caller's domain lists do not allow {url.host}")


class PageLoader:
    """Loads pages through one `Transport`; identical loads at once share one request, also
    between processes that share the cache folder."""

    def __init__(
        self,
        config: Config,
        transport: Transport,
        policy: AddressPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._transport = transport
        self._policy = policy
        self._clock = clock
        self._slots = HostSlots(
            config.host_requests_per_second,
            config.host_burst,
            config.host_connections,
            config.host_queue,
        )
        self._robots = RobotsCache(self._get_robots, self._parse_robots)
        self.cache = PageCache(config.home / "cache", config.cache_bytes, clock=clock)
        self._threads = WorkThreads("the page cache", _CACHE_THREADS, per_client=2, kept=1)
        self._locks = config.home / "cache" / "locks"
        self._locks.mkdir(exist_ok=True)
        self._delays: dict[str, float] = {}
        self._flights: dict[str, asyncio.Task[Loaded]] = {}

    async def close(self) -> None:
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self._threads.close()
        self.cache.close()

    async def load(
        self,
        url: urls.Url,
        request: FetchRequest,
        *,
        domains: DomainRule | None = None,
        network: bool = True,
        crawl: bool = False,
    ) -> Loaded:
        """The page's bytes from the cache or the network. Raises SearchFetchError."""
        domains = domains or DomainRule()
        self._policy.check_url(url)
        domains.check(url)
        key = PageCache.key(url, request.accept_language)
        entry, known = await self._threads.run(self._known, key, request.max_age)
        if entry is not None and self._is_fresh(entry, request.max_age):
            return self.from_cache(entry)
        if known is not None:
            raise known
        if not network:
            raise UpstreamError(
                "connect_failure", "not in the cache, and the network is switched off"
            )
        return await self.share(
            f"{key}:{domains}:{crawl}:{request.store}",
            lambda: self._load_alone(url, key, entry, request, domains, crawl),
        )

    def from_cache(self, entry: CacheEntry, *, rendered: bool = False) -> Loaded:
        info = self._cache_info(entry, hit=True)
        return Loaded(entry.page, info, RobotsInfo(allowed=True, source="cache"), rendered=rendered)

    async def cached(self, key: str, max_age: int) -> CacheEntry | None:
        """The entry if it is as fresh as the caller wants it."""
        entry = await self._threads.run(self.cache.get, key)
        return entry if entry is not None and self._is_fresh(entry, max_age) else None

    async def store(self, key: str, page: Page, request: FetchRequest) -> CacheInfo:
        """Put a page into the cache if caller and page allow it."""
        stored = None
        if request.store:
            stored = await self._threads.run(self.cache.put, key, page, _ttl(request))
        return CacheInfo(hit=False) if stored is None else self._cache_info(stored, hit=False)

    async def forget(self, key: str) -> None:
        """Take a page out of the cache."""
        await self._threads.run(self.cache.remove, key)

    async def share(self, key: str, work: Callable[[], Coroutine[Any, Any, Loaded]]) -> Loaded:
        """The result of `work`, run once for all callers that ask for `key` meanwhile."""
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.create_task(work())
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._landed(key, done))
        # Another caller may wait on the same flight: one caller's timeout must not end it.
        return await asyncio.shield(flight)

    def gate(self, domains: DomainRule, crawl: bool) -> Gate:
        """What every hop and every navigation must pass: policy, domain lists, robots.txt."""

        async def check(hop: urls.Url) -> None:
            self._policy.check_url(hop)
            domains.check(hop)
            await self._check_robots(hop, crawl)

        return check

    def _landed(self, key: str, flight: asyncio.Task[Loaded]) -> None:
        self._flights.pop(key, None)
        if not flight.cancelled():
            # Every waiter may have timed out; then nobody else looks at the failure.
            flight.exception()

    def _is_fresh(self, entry: CacheEntry, max_age: int) -> bool:
        now = self._clock()
        return now < entry.expires and now - entry.stored < max_age

    def _known(self, key: str, max_age: int) -> tuple[CacheEntry | None, UpstreamError | None]:
        """What is stored of a page, or the failure remembered; in one turn of a thread, which on a
        busy machine takes longer than the reading."""
        entry = self.cache.get(key)
        return entry, self.cache.failure(key) if max_age and entry is None else None

    async def _load_alone(
        self,
        url: urls.Url,
        key: str,
        entry: CacheEntry | None,
        request: FetchRequest,
        domains: DomainRule,
        crawl: bool,
    ) -> Loaded:
        asked = self._clock()
        async with self._between_processes(key, request.store) as waited:
            if waited:
                entry = await self._threads.run(self.cache.get, key)
                if entry is not None and entry.stored >= asked and self._clock() < entry.expires:
                    return self.from_cache(entry)  # another process has just loaded it
            loaded = await self._load(url, key, entry, request, domains, crawl)
        return loaded

    @asynccontextmanager
    async def _between_processes(self, key: str, shared: bool) -> AsyncGenerator[bool]:
        """One process at a time per page; whoever waits too long goes ahead alone. Yields whether
        it had to wait."""
        # The whole key: a page must never wait for one that only shares a part of it.
        lock = FileLock(self._locks / key, thread_local=False)
        deadline = time.monotonic() + self._config.limits.total_seconds
        waited = False
        while shared and not lock.is_locked:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                waited = True
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(_LOCK_POLL_SECONDS)
        try:
            yield waited
        finally:
            # Gone while it is held: who waits on the old file goes ahead, at worst beside another.
            if lock.is_locked:
                (self._locks / key).unlink(missing_ok=True)
            lock.release()

    async def _load(
        self,
        url: urls.Url,
        key: str,
        entry: CacheEntry | None,
        request: FetchRequest,
        domains: DomainRule,
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
            if self._may_be_stale(entry):
                return self._stale(entry, robots)
            if isinstance(error, TimeoutError):
                raise UpstreamError("timeout", "the page took too long") from None
            await self._threads.run(self.cache.remember_failure, key, error)
            raise
        status = page.response.status
        if status == 304 and entry is not None:
            fresh = await self._threads.run(
                self.cache.refresh, key, entry, page.response, _ttl(request)
            )
            return Loaded(fresh.page, self._cache_info(fresh, hit=True, revalidated=True), robots)
        if status in _STALE_STATUSES and self._may_be_stale(entry):
            return self._stale(entry, robots)
        problem = failure_of(page.response)
        if problem is not None:
            await self._threads.run(self.cache.remember_failure, key, problem)
        return Loaded(page, await self.store(key, page, request), robots)

    def _may_be_stale(self, entry: CacheEntry | None) -> bool:
        return entry is not None and self._clock() - entry.stored < STALE_IF_ERROR_SECONDS

    def _stale(self, entry: CacheEntry | None, robots: RobotsInfo) -> Loaded:
        assert entry is not None, "_may_be_stale was asked first"
        return Loaded(entry.page, self._cache_info(entry, hit=True), robots, ("stale",))

    async def _get(self, url: urls.Url, headers: Sequence[tuple[str, str]]) -> Response:
        async with self._slots.slot(url.host, min_interval=self._delays.get(url.host, 0.0)):
            response = await self._transport.get(url, headers)
        if response.status in (429, 503):
            wait = delta_seconds(response.header("retry-after") or "")
            if wait is not None:
                self._slots.postpone(url.host, min(wait, _RETRY_AFTER_CAP_SECONDS))
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
        async def get(hop: urls.Url, headers: Sequence[tuple[str, str]]) -> Response:
            try:
                return await self._transport.get(hop, headers)
            except SearchFetchError as error:
                if hop == url and error.code in _NO_CONNECTION:
                    raise OriginError(error) from None
                raise

        page = await follow(
            self._transport, url, (), self._config.limits, get=get, max_redirects=_ROBOTS_REDIRECTS
        )
        return page.response.status, page.response.body

    async def _parse_robots(self, body: bytes) -> Rules:
        return await self._threads.run(read_robots, body)

    def _cache_info(self, entry: CacheEntry, *, hit: bool, revalidated: bool = False) -> CacheInfo:
        return CacheInfo(
            hit=hit,
            stored_at=_timestamp(entry.stored),
            age=max(0, int(self._clock() - entry.stored)),
            revalidated=revalidated,
            etag=entry.etag,
            expires=_timestamp(entry.expires),
        )


def _ttl(request: FetchRequest) -> float:
    # max_age = 0 asks for revalidation now; what is stored may still serve other callers.
    return float(min(request.max_age or 86_400, MAX_TTL_SECONDS))


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
