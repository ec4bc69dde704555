"""Breadth-first crawling within limits: depth, pages, pages per domain, robots.txt, crawl-delay."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.index.authority import AuthorityTable, node_of
from deepinfer_search_fetch.index.links import PageLink
from deepinfer_search_fetch.index.sources.frontier import Frontier, Target

CHECKPOINT_PAGES = 25
MAX_URL_CHARS = 1024
# Endings of what a crawl does not ask for: pictures, sound, archives, scripts.
_NO_PAGE = (
    *(".jpg", ".jpeg", ".png", ".gif", ".svg", ".webp", ".ico", ".woff", ".woff2", ".ttf"),
    *(".css", ".js", ".mp3", ".mp4", ".webm", ".avi", ".mov", ".exe", ".dmg", ".iso"),
    *(".zip", ".gz", ".tar", ".bz2", ".xz", ".7z", ".rar"),
)


@dataclass(frozen=True, slots=True)
class CrawlOptions:
    """scope: "host" and "domain" stay on the seeds' hosts or registrable domains, "any" leaves
    them. depth: links from a seed. per_domain: URLs of one registrable domain."""

    max_pages: int = 1000
    depth: int = 3
    per_domain: int = 500
    scope: Literal["host", "domain", "any"] = "domain"
    concurrency: int = 4

    def __post_init__(self) -> None:
        for name in ("max_pages", "per_domain", "concurrency"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(
                    "invalid_argument",
                    f"crawl {name} must be at least 1, not {getattr(self, name)}",
                )
        if self.depth < 0:
            raise InvalidRequestError("invalid_argument", f"crawl depth {self.depth} is negative")


Visit = Callable[[str], Awaitable[tuple[PageLink, ...]]]


class Crawl:
    """One crawl. visit: reads and indexes one URL and returns its links; it never raises for a
    page that cannot be had. commit: makes what was indexed durable."""

    def __init__(
        self,
        folder: Path,
        seed: str,
        options: CrawlOptions,
        authorities: AuthorityTable,
        visit: Visit,
        commit: Callable[[], Awaitable[object]],
    ) -> None:
        start = urls.parse(seed)
        self._seed = urls.canonical(start)
        self._host = start.host
        self._options = options
        self._authorities = authorities
        self._visit = visit
        self._commit = commit
        identity = json.dumps([self._seed, options.scope, options.depth], sort_keys=True)
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._frontier = Frontier(folder / f"{name}.sqlite3", options.per_domain)
        self._done: list[str] = []
        self._found: list[Target] = []

    async def run(self) -> None:
        """Crawl until nothing is open or `max_pages` were read, those of earlier runs included."""
        options = self._options
        self._frontier.settle([], [self._target(self._seed, 0)])
        read, _ = self._frontier.counts()
        working: dict[asyncio.Task[list[Target]], Target] = {}
        try:
            while True:
                while (
                    len(working) < options.concurrency and read + len(working) < options.max_pages
                ):
                    target = self._next(working.values())
                    if target is None:
                        break
                    working[asyncio.create_task(self._read(target))] = target
                if not working:
                    if not self._done:
                        break
                    await self._checkpoint()  # its links may hold the next URL
                    continue
                finished, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    self._found += task.result()
                    self._done.append(working.pop(task).url)
                    read += 1
                if len(self._done) >= CHECKPOINT_PAGES:
                    await self._checkpoint()
            complete = self._frontier.counts()[1] == 0 or read >= options.max_pages
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            self._frontier.close()
        if complete:
            self._frontier.remove()

    def _next(self, working: Iterable[Target]) -> Target | None:
        targets = list(working)
        taken = [*self._done, *(t.url for t in targets)]
        return self._frontier.next(taken, [t.node for t in targets])

    async def _read(self, target: Target) -> list[Target]:
        links = await self._visit(target.url)
        if target.depth >= self._options.depth:
            return []
        return [self._target(link.url, target.depth + 1) for link in links if self._wanted(link)]

    async def _checkpoint(self) -> None:
        await self._commit()
        self._frontier.settle(self._done, self._found)
        self._done, self._found = [], []

    def _wanted(self, link: PageLink) -> bool:
        if not link.trusted or len(link.url) > MAX_URL_CHARS:
            return False
        try:
            url = urls.parse(link.url)
        except SearchFetchError:
            return False
        if url.path.lower().endswith(_NO_PAGE):
            return False
        if self._options.scope == "host":
            return url.host == self._host
        return self._options.scope == "any" or node_of(url.host) == node_of(self._host)

    def _target(self, url: str, depth: int) -> Target:
        host = urls.parse(url).host
        return Target(url, node_of(host), depth, self._authorities.of_page(url).score)
