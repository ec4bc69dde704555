"""What a source yields: a document to extract, a finished page, or the reason for neither."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from deepinfer_search_fetch.index.document import IndexedPage


@dataclass(frozen=True, slots=True)
class Skip:
    """reason: counted in the report. failed: something is wrong, not merely left out."""

    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class RawDocument:
    """Bytes to extract. url: where they came from, absolute; name: title if the text has none.
    fetched_at: RFC 3339."""

    body: bytes
    url: str
    content_type: str | None
    fetched_at: str
    name: str


Item = IndexedPage | RawDocument | Skip


def timestamp(seconds: float | None = None) -> str:
    """RFC 3339 in UTC; now for None."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
