"""Sitemaps and feeds: lists of page addresses. No DTD is loaded, no entity is resolved."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError

MAX_SITEMAP_BYTES = 50 * 1024 * 1024
MAX_FEED_ENTRIES = 1000


@dataclass(frozen=True, slots=True)
class Entry:
    """url: of a page or a nested sitemap. modified, published: RFC 3339 or a day, if stated."""

    url: str
    modified: str | None = None
    published: str | None = None


def parse_sitemap(body: bytes) -> tuple[list[Entry], list[Entry]]:
    """(nested sitemaps, pages) of sitemap XML or a plain list of URLs; gzip allowed.

    Raises InvalidRequestError for anything else.
    """
    if body.startswith(b"\x1f\x8b"):
        try:
            body = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(body, MAX_SITEMAP_BYTES)
        except zlib.error:
            raise InvalidRequestError("invalid_argument", "sitemap is damaged gzip") from None
    if body.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"http"):
        lines = body.decode("utf-8-sig", "replace").splitlines()
        return [], [Entry(line.strip()) for line in lines if line.strip()]
    root = _root(body)
    if root is None:
        raise InvalidRequestError("invalid_argument", "sitemap is not XML")
    nested: list[Entry] = []
    pages: list[Entry] = []
    for element in root:
        fields = {_name(child): (child.text or "").strip() for child in element}
        if fields.get("loc"):
            entry = Entry(fields["loc"], _moment(fields.get("lastmod")))
            (nested if _name(element) == "sitemap" else pages).append(entry)
    return nested, pages


def parse_feed(body: bytes, base: urls.Url) -> list[Entry]:
    """The entries of RSS, Atom or RDF, in the feed's order.

    Raises InvalidRequestError for what is no feed.
    """
    root = _root(body)
    if root is None or _name(root).lower() not in ("rss", "feed", "rdf"):
        raise InvalidRequestError("invalid_argument", "not an RSS, Atom or RDF feed")
    found: list[Entry] = []
    for element in root.iter():
        if _name(element) in ("item", "entry") and len(found) < MAX_FEED_ENTRIES:
            link = _feed_link(element)
            try:
                url = str(urls.join(base, link)) if link else ""
            except SearchFetchError:
                continue
            if url:
                fields = {_name(child): (child.text or "").strip() for child in element}
                dates = (fields.get(n) for n in ("published", "pubDate", "date", "updated"))
                published = next((m for m in map(_moment, dates) if m), None)
                found.append(Entry(url, _moment(fields.get("updated")), published))
    return found


def _root(body: bytes) -> Any:
    if not body.strip():
        return None
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, recover=True)
    try:
        return etree.fromstring(body, parser)
    except etree.XMLSyntaxError:
        return None


def _name(element: Any) -> str:
    return etree.QName(element).localname if isinstance(element.tag, str) else ""


def _feed_link(entry: Any) -> str:
    for child in entry:
        if _name(child) == "link" and child.get("rel", "alternate") == "alternate":
            return (child.get("href") or child.text or "").strip()
    return ""


def _moment(text: str | None) -> str | None:
    """RFC 3339 from what sitemaps and feeds write (RFC 3339 or RFC 2822), None for neither."""
    if not text:
        return None
    try:
        if text[:4].isdigit():
            moment = datetime.fromisoformat(text)
            if len(text) <= 10:
                return moment.date().isoformat()
        else:
            moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
