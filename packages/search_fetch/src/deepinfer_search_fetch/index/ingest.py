"""Bringing pages into the index: URLs, files and folders, JSON lines, sitemaps.

Idempotent: a page whose visible content did not change is not written again.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.extract.dispatch import extract_document
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.fetching import Fetcher
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import SearchBackend
from deepinfer_search_fetch.models import FetchRequest, FetchResponse, IngestReport

SourceKind = Literal["url", "file", "jsonl", "sitemap"]
MAX_FILE_BYTES = 50 * 1024 * 1024
MAX_SITEMAP_URLS = 50_000
MAX_SITEMAPS = 200
_MAX_SITEMAP_BYTES = 50 * 1024 * 1024
_COMMIT_EVERY = 2000
_SUFFIXES = frozenset({".html", ".htm", ".xhtml", ".md", ".markdown", ".txt", ".json", ".csv"})


@dataclass(frozen=True, slots=True)
class Source:
    """What to ingest. location: a URL, or a path for `file` (a folder is walked) and `jsonl`."""

    kind: SourceKind
    location: str


class Ingester:
    """Writes into `backend`; `fetcher` is needed for `url` and `sitemap`."""

    def __init__(self, backend: SearchBackend, fetcher: Fetcher | None = None) -> None:
        self._backend = backend
        self._fetcher = fetcher
        self._counts: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._pending: dict[str, str] = {}

    async def run(self, source: Source) -> IngestReport:
        """Ingest one source; what fails is counted by reason and does not stop the rest."""
        if source.kind == "url":
            await self._fetch_and_add(source.location)
        elif source.kind == "sitemap":
            async for location in self._sitemap(source.location):
                await self._fetch_and_add(location)
        else:
            pages = _file_pages if source.kind == "file" else _jsonl_pages
            for item in pages(Path(source.location)):
                self._take(item)
        generation = self._backend.commit()
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
        self._counts["seen"] += 1
        known = self._pending.get(page.doc_id)
        if known is not None:
            self._counts["duplicate"] += 1
            return
        old = self._backend.get(page.doc_id)
        self._pending[page.doc_id] = page.content_hash
        if old is not None and _same(old, page):
            self._counts["unchanged"] += 1
            return
        self._backend.index([page])
        self._counts["updated" if old is not None else "indexed"] += 1
        if (self._counts["indexed"] + self._counts["updated"]) % _COMMIT_EVERY == 0:
            self._backend.commit()

    def _take(self, item: IndexedPage | _Skip) -> None:
        if isinstance(item, IndexedPage):
            self.add(item)
            return
        self._counts["seen"] += 1
        (self._failed if item.failed else self._skipped)[item.reason] += 1

    async def _fetch_and_add(self, location: str) -> None:
        if self._fetcher is None:
            raise InvalidRequestError(
                "invalid_argument", "this ingester was made without a fetcher"
            )
        try:
            response = await self._fetcher.fetch(
                FetchRequest(url=location, max_tokens=None, render="never"), crawl=True
            )
        except SearchFetchError as error:
            self._take(_Skip(error.code, failed=error.code != "robots_disallowed"))
            return
        self.add(page_of(response))

    async def _sitemap(self, location: str) -> AsyncIterator[str]:
        """Page URLs of a sitemap or sitemap index, each once."""
        if self._fetcher is None:
            raise InvalidRequestError(
                "invalid_argument", "this ingester was made without a fetcher"
            )
        queue = [location]
        read: set[str] = set()
        found: set[str] = set()
        while queue and len(read) < MAX_SITEMAPS:
            current = queue.pop(0)
            if current in read:
                continue
            read.add(current)
            try:
                loaded = await self._fetcher.load(urls.parse(current), FetchRequest(url=current))
                if loaded.page.response.status != 200:
                    raise InvalidRequestError("not_found", "sitemap not found")
                nested, pages = parse_sitemap(loaded.page.response.body)
            except SearchFetchError as error:
                self._take(_Skip(f"sitemap_{error.code}", failed=True))
                continue
            queue += nested
            for page in pages:
                if page not in found and len(found) < MAX_SITEMAP_URLS:
                    found.add(page)
                    yield page


@dataclass(frozen=True, slots=True)
class _Skip:
    reason: str
    failed: bool = False


def parse_sitemap(body: bytes) -> tuple[list[str], list[str]]:
    """(nested sitemaps, page URLs) of sitemap XML, gzip allowed; no DTD, no entities."""
    if body.startswith(b"\x1f\x8b"):
        try:
            body = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(body, _MAX_SITEMAP_BYTES)
        except zlib.error:
            raise InvalidRequestError("invalid_argument", "sitemap is damaged gzip") from None
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, recover=True)
    root = etree.fromstring(body, parser) if body.strip() else None
    if root is None:
        raise InvalidRequestError("invalid_argument", "sitemap is not XML")
    nested: list[str] = []
    pages: list[str] = []
    for entry in root:
        if not isinstance(entry.tag, str):
            continue
        kind = etree.QName(entry).localname
        for child in entry:
            if isinstance(child.tag, str) and etree.QName(child).localname == "loc" and child.text:
                (nested if kind == "sitemap" else pages).append(child.text.strip())
    return nested, pages


def page_of(response: FetchResponse) -> IndexedPage:
    """A fetched page as it is indexed."""
    url = urls.canonical(urls.parse(response.canonical_url or response.final_url))
    return IndexedPage(
        url=url,
        title=response.title or url,
        content=response.content,
        fetched_at=response.cache.stored_at or _now(),
        language=response.language,
        published=response.published,
        site_name=response.site_name,
        page_type=response.page_type,
    )


def _file_pages(path: Path) -> Iterator[IndexedPage | _Skip]:
    """A file, or every readable file below a folder in name order; links are not followed."""
    if not path.exists():
        raise InvalidRequestError("not_found", f"{path} does not exist")
    for file in [path] if path.is_file() else _walk(path):
        if file.suffix.lower() not in _SUFFIXES:
            yield _Skip("file_type")
            continue
        if file.stat().st_size > MAX_FILE_BYTES:
            yield _Skip("too_large")
            continue
        try:
            extraction = extract_document(file.read_bytes(), None, _header_of(file), HtmlOptions())
        except (SearchFetchError, OSError) as error:
            yield _Skip(getattr(error, "code", "unreadable"), failed=True)
            continue
        if not extraction.content.strip():
            yield _Skip("extraction_empty")
            continue
        yield IndexedPage(
            url=extraction.canonical_url or file.resolve().as_uri(),
            title=extraction.title or file.stem,
            content=extraction.content,
            fetched_at=_now(file.stat().st_mtime),
            language=extraction.language,
            published=extraction.published,
            site_name=extraction.site_name,
            page_type=extraction.page_type,
        )


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            file = Path(root) / name
            if not file.is_symlink():
                yield file


def _header_of(file: Path) -> str | None:
    return {".md": "text/markdown", ".markdown": "text/markdown", ".csv": "text/csv",
            ".txt": "text/plain", ".json": "application/json"}.get(file.suffix.lower())  # fmt: skip


def _jsonl_pages(path: Path) -> Iterator[IndexedPage | _Skip]:
    """Lines {"url", "title", "text" or "content", "language"?, "published"?, "site_name"?}."""
    if not path.is_file():
        raise InvalidRequestError("not_found", f"{path} is not a file")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = cast(dict[str, Any], json.loads(line))
                content = row.get("content") or row["text"]
                page = IndexedPage(
                    url=str(row["url"]),
                    title=str(row.get("title") or row["url"]),
                    content=str(content),
                    fetched_at=str(row.get("fetched_at") or _now(path.stat().st_mtime)),
                    language=row.get("language"),
                    published=row.get("published"),
                    site_name=row.get("site_name"),
                )
                if page.url.startswith("http"):
                    page_url = urls.canonical(urls.parse(page.url))
                    page = IndexedPage(**{**page.to_record(), "url": page_url})
            except (ValueError, KeyError, TypeError, AttributeError, SearchFetchError):
                yield _Skip("invalid_line", failed=True)
                continue
            yield page


def _same(old: IndexedPage, new: IndexedPage) -> bool:
    from deepinfer_search_fetch.index.document import MAX_STORED_CHARS

    cut = IndexedPage(**{**new.to_record(), "content": new.content[:MAX_STORED_CHARS]})
    return old.content_hash == cut.content_hash


def _now(timestamp: float | None = None) -> str:
    moment = datetime.now(UTC) if timestamp is None else datetime.fromtimestamp(timestamp, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
