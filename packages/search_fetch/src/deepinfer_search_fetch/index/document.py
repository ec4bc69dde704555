"""What is stored of one page."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer_search_fetch import urls

MAX_STORED_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True)
class IndexedPage:
    """url: canonical. content: Markdown or plain text. Dates are RFC 3339 or a plain day."""

    url: str
    title: str
    content: str
    fetched_at: str
    language: str | None = None
    published: str | None = None
    site_name: str | None = None
    page_type: str = "other"

    @property
    def doc_id(self) -> str:
        return hashlib.sha256(self.url.encode()).hexdigest()[:32]

    @property
    def content_hash(self) -> str:
        """Changes when anything a searcher can see changes; the time of fetching is not part."""
        text = f"{self.title}\n{self.published}\n{self.language}\n{self.content}"
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    @property
    def host(self) -> str:
        """The host, or "" for an id that is not a URL."""
        return urls.parse(self.url).host if self.url.startswith(("http://", "https://")) else ""

    def to_record(self) -> dict[str, Any]:
        return asdict(self)
