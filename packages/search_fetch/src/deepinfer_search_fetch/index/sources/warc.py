"""Web archives (WARC, also gzip and zstd): the pages of response and resource records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecordType

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.index.sources.item import Item, RawDocument, Skip, timestamp

MAX_RECORD_BYTES = 10 * 1024 * 1024
_READABLE = ("text/", "application/xhtml", "application/xml", "application/json", "application/pdf",
             "application/rss", "application/atom")  # fmt: skip


def read_warc(path: Path) -> Iterator[Item]:
    """One item per response or resource record; what cannot be a page is skipped by reason.

    Records that say they are truncated are skipped; a file that is cut off ends the reading.
    """
    if not path.is_file():
        raise InvalidRequestError("not_found", f"{path} is not a file")
    wanted = WarcRecordType.response | WarcRecordType.resource
    with path.open("rb") as stream:
        records: Any = ArchiveIterator(
            stream, record_types=wanted, parse_http=True, auto_decode="all"
        )
        while True:
            try:
                record = next(records)
                item = _item(record)
            except StopIteration:
                return
            except (OSError, ValueError, EOFError):
                yield Skip("damaged_archive", failed=True)
                return
            yield item


def _item(record: Any) -> Item:
    headers = record.headers
    if headers.get("WARC-Truncated"):
        return Skip("truncated")
    try:
        url = urls.parse((headers.get("WARC-Target-URI") or "").strip("<>"))
    except SearchFetchError:
        return Skip("invalid_url", failed=True)
    content_type = headers.get("Content-Type")
    http = record.http_headers
    if http is not None:
        if http.status_code != 200:
            return Skip(f"http_{http.status_code}")
        content_type = http.get("Content-Type")
        robots = (http.get("X-Robots-Tag") or "").lower()
        if "noindex" in robots or "none" in robots:
            return Skip("noindex")
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind and not kind.startswith(_READABLE):
        return Skip("content_type")
    body: bytes = record.reader.read(MAX_RECORD_BYTES + 1)
    if len(body) > MAX_RECORD_BYTES:
        return Skip("too_large")
    declared = headers.get("Content-Length")
    if http is None and declared and declared.isdigit() and len(body) < int(declared):
        return Skip("truncated")
    when = record.record_date
    moment = timestamp(when.timestamp()) if when is not None else timestamp()
    return RawDocument(body, str(url.without_fragment()), content_type, moment, str(url))
