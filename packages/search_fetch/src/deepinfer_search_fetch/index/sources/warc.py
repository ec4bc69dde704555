"""Web archives (WARC, also gzip and zstd): the pages of response and resource records."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecordType

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.index.sources.item import Item, RawDocument, Skip, timestamp

MAX_RECORD_BYTES = 10 * 1024 * 1024
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's name for its largest window in a gzip wrapper
_PIECE = 1024 * 1024
_READABLE = ("text/", "application/xhtml", "application/xml", "application/json", "application/pdf",
             "application/rss", "application/atom")  # fmt: skip


def read_warc(path: Path) -> Iterator[Item]:
    """One item per response or resource record; what cannot be a page is skipped by reason.

    Records that say they are truncated are skipped; a file that is damaged or cut off ends the
    reading, with a failed item. Raises InvalidRequestError where not one record was found.
    """
    if not path.is_file():
        raise InvalidRequestError("not_found", f"{path} is not a file")
    wanted = WarcRecordType.response | WarcRecordType.resource
    with path.open("rb") as stream:
        records: Any = ArchiveIterator(
            stream, record_types=wanted, parse_http=True, auto_decode="all"
        )
        place: int | None = None
        while True:
            try:
                record = next(records)
                place = record.stream_pos
                item = _item(record)
            except StopIteration:
                damaged = _is_cut_off(path, place or 0) or (place is None and _is_no_archive(path))
                break
            except (OSError, ValueError, EOFError):
                damaged = True
                break
            yield item
    if damaged and place is None:
        raise InvalidRequestError(
            "invalid_argument",
            f"{path} ({path.stat().st_size} bytes) holds no whole WARC record: it is cut off, or no"
            " web archive; get it again",
        )
    if damaged:
        yield Skip("damaged_archive", failed=True)


def _is_cut_off(path: Path, start: int) -> bool:
    """Whether a gzip file ends inside a member; start: where its last known record begins."""
    with path.open("rb") as stream:
        if stream.read(2) != _GZIP:
            return False
        stream.seek(start)
        if stream.read(2) != _GZIP:  # all records in one member
            start = 0
        stream.seek(start)
        member = zlib.decompressobj(_GZIP_WINDOW)
        while data := stream.read(_PIECE):
            while data:
                if member.eof:
                    member = zlib.decompressobj(_GZIP_WINDOW)
                try:
                    member.decompress(data, _PIECE)
                    while member.unconsumed_tail:
                        member.decompress(member.unconsumed_tail, _PIECE)
                except zlib.error:
                    return True
                data = member.unused_data
        return not member.eof


def _is_no_archive(path: Path) -> bool:
    with path.open("rb") as stream:
        records: Any = ArchiveIterator(stream, parse_http=False)
        return next(records, None) is None


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
