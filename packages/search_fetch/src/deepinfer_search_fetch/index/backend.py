"""What a search needs of an index, and how a page is analysed for one, whatever the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Protocol

from deepinfer_search_fetch.analyzers import content_terms, terms
from deepinfer_search_fetch.index.dedupe import fingerprint_of_terms
from deepinfer_search_fetch.index.document import MAX_STORED_CHARS, IndexedPage

TEXT_FIELDS = ("title", "headings", "body", "anchors", "url_terms")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
_MARKUP = re.compile(r"\]\([^()\s]*\)|[*`\[\]|]")


class Hit:
    """One retrieved page with its retrieval score; the page is read when it is first asked for."""

    __slots__ = ("_load", "_page", "score")

    def __init__(self, score: float, load: Callable[[], IndexedPage]) -> None:
        self.score = score
        self._load = load
        self._page: IndexedPage | None = None

    @property
    def page(self) -> IndexedPage:
        if self._page is None:
            self._page = self._load()
        return self._page

    def scored(self, score: float) -> Hit:
        """The same page under another score."""
        return Hit(score, lambda: self.page)


@dataclass(frozen=True, slots=True)
class FieldTerm:
    """edits: how many typing slips the term may differ by."""

    field: str
    term: str
    boost: float
    edits: int = 0


@dataclass(frozen=True, slots=True)
class Retrieval:
    """A query in the terms of any backend.

    groups: one per query term; a document scores by the best field of each group (dis-max with
    `tie`). minimum: how many groups must match. phrases, excluded: (field, terms), "any" for title
    or body. sites, blocked_sites: label suffixes. day_range: days since 1970-01-01, inclusive.
    alternatives: positions in `groups`, one of each must match.
    """

    groups: tuple[tuple[FieldTerm, ...], ...]
    minimum: int = 1
    tie: float = 0.1
    phrases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    excluded: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sites: tuple[str, ...] = ()
    blocked_sites: tuple[str, ...] = ()
    language: str | None = None
    day_range: tuple[int | None, int | None] | None = None
    alternatives: tuple[tuple[int, ...], ...] = ()


class SearchSnapshot(Protocol):
    """An index as it stood at one commit, whatever is written meanwhile."""

    def get(self, doc_id: str) -> IndexedPage | None: ...
    def pages(self, limit: int) -> Iterator[IndexedPage]: ...
    def retrieve(self, query: Retrieval, k: int) -> list[Hit]: ...
    def doc_freqs(self, field: str, terms: Sequence[str]) -> list[int]: ...
    def size(self) -> int: ...
    def generation(self) -> int: ...


class SearchBackend(SearchSnapshot, Protocol):
    """An index. Writes are visible, and durable, after `commit`, which returns the generation.

    Its own reading methods are those of the newest snapshot.
    """

    def index(self, pages: Iterable[IndexedPage]) -> None: ...
    def delete(self, doc_ids: Sequence[str]) -> None: ...
    def commit(self) -> int: ...
    def snapshot(self) -> SearchSnapshot: ...


@dataclass(frozen=True, slots=True)
class Analysed:
    """A page as an engine stores it.

    texts: per field of TEXT_FIELDS, terms between blanks (absent if empty). sites: the host and its
    parents. day: days since 1970-01-01. record: the page as JSON.
    """

    doc_id: str
    texts: dict[str, str]
    sites: list[str]
    language: str | None
    day: int | None
    record: str


def analyse(page: IndexedPage) -> Analysed:
    """Terms, filters and the stored record of a page."""
    host = page.host
    labels = host.split(".") if host else []
    title = content_terms(page.title)
    body = content_terms(_plain(page.content))
    # The body holds the title too: a title word is then never worth less than a body word.
    texts = {
        "title": " ".join(title),
        "body": " ".join([*title, *body]),
        "url_terms": " ".join(terms(page.url)),
    }
    headings = _HEADING.findall(page.content) if "#" in page.content else []
    if headings:
        texts["headings"] = " ".join(content_terms(_plain(" ".join(headings))))
    if page.anchors:
        texts["anchors"] = " ".join(content_terms(page.anchors))
    record = page.to_record()
    record["content"] = page.content[:MAX_STORED_CHARS]
    if page.fingerprint is None:
        print_ = fingerprint_of_terms(body)
        record["fingerprint"] = (print_.simhash, print_.words)
    return Analysed(
        page.doc_id,
        texts,
        [".".join(labels[i:]) for i in range(len(labels))],
        page.language,
        day_number(page.published or page.first_seen or page.fetched_at),
        json.dumps(record, ensure_ascii=False),
    )


def page_of_record(record: str | bytes) -> IndexedPage:
    """The page of a stored record."""
    return IndexedPage.from_record(json.loads(record))


def day_number(text: str | None) -> int | None:
    """Days since 1970-01-01 of an RFC 3339 time or day; None for none or an earlier one."""
    return _day_of(text[:10]) if text else None


@lru_cache(maxsize=20_000)
def _day_of(day: str) -> int | None:
    try:
        return max(0, (date.fromisoformat(day) - date(1970, 1, 1)).days)
    except ValueError:
        return None


def _plain(markdown: str) -> str:
    return _MARKUP.sub(" ", markdown) if _MARKUP.search(markdown) else markdown
