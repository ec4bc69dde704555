"""What is stored of one page."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from deepinfer_search_fetch.index.dedupe import Fingerprint, fingerprint

MAX_STORED_CHARS = 64 * 1024
_PLAIN_PLACE = re.compile(r"[A-Za-z0-9.-]+")


@dataclass(frozen=True, slots=True)
class IndexedPage:
    """url: canonical. content: Markdown or plain text. Dates are RFC 3339 or a plain day.

    anchors: texts of links to this page, one a line. fingerprint: (simhash, words) of the content,
    computed when the page is written. first_seen: when this index first held the URL.
    """

    url: str
    title: str
    content: str
    fetched_at: str
    language: str | None = None
    published: str | None = None
    site_name: str | None = None
    page_type: str = "other"
    anchors: str = ""
    first_seen: str | None = None
    fingerprint: tuple[int, int] | None = None

    @property
    def doc_id(self) -> str:
        return hashlib.sha256(self.url.encode()).hexdigest()[:32]

    @property
    def content_hash(self) -> str:
        """Changes when anything a searcher can see changes; the time of fetching is not part."""
        content = self.content[:MAX_STORED_CHARS]
        text = f"{self.title}\n{self.published}\n{self.language}\n{self.anchors}\n{content}"
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    @property
    def host(self) -> str:
        """The host, or "" for an id that is not a URL."""
        # The URL was checked when the page was made; here it is only taken apart.
        scheme, mark, rest = self.url.partition("://")
        if not mark or scheme not in ("http", "https"):
            return ""
        place = rest.partition("/")[0]
        if _PLAIN_PLACE.fullmatch(place):
            return place.lower()
        return urlsplit(self.url).hostname or ""

    @property
    def copy_print(self) -> Fingerprint:
        """What near-duplicates are compared by."""
        if self.fingerprint is None:
            return fingerprint(self.content[:MAX_STORED_CHARS])
        return Fingerprint(*self.fingerprint)

    def to_record(self) -> dict[str, Any]:
        """The page as plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> IndexedPage:
        """The opposite of `to_record`."""
        if record.get("fingerprint"):
            record["fingerprint"] = tuple(record["fingerprint"])
        return cls(**record)
