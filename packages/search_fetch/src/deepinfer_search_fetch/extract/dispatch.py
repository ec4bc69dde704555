"""From bytes to the extractor that understands them: sniff, then header, then file extension."""

from __future__ import annotations

import json
import re
from typing import Literal, cast

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import ContentError
from deepinfer_search_fetch.extract import Extraction, feeds, textual
from deepinfer_search_fetch.extract.dom import MAX_CHARS
from deepinfer_search_fetch.extract.html import HtmlOptions, extract_html
from deepinfer_search_fetch.extract.package import package_kind
from deepinfer_search_fetch.net.charset import decode_text

Kind = Literal[
    "html", "feed", "json", "xml", "csv", "markdown", "text",
    "pdf", "docx", "pptx", "xlsx", "odt", "odp", "ods", "epub", "binary",
]  # fmt: skip

_CONTROLS = bytes(b for b in range(32) if b < 9 or 13 < b < 27 or b > 27)
_SNIFF_BYTES = 4096
# What is longer is cut before it is decoded: nothing behind it could be answered within the limits.
MAX_TEXT_BYTES = 8 * 1024 * 1024
_SNIFF_JSON_BYTES = 400_000  # of a larger body the first and the last sign must do
_PDF_WINDOW = 1024  # readers of PDF forgive so much in front of its header
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"%PDF-", "application/pdf"),
    (b"\x89PNG\r\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
    (b"BZh", "application/x-bzip2"),
    (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (b"Rar!", "application/vnd.rar"),
    (b"\xfd7zXZ", "application/x-xz"),
    (b"\x7fELF", "application/x-executable"),
    (b"\xd0\xcf\x11\xe0", "application/x-ole-storage"),
    (b"{\\rtf", "application/rtf"),
)
_HTML = re.compile(
    rb"<!doctype\s+html|<html[\s>]|<head[\s>]|<body[\s>]|<(?:div|p|article|table|h1|title|meta)[\s>]",
    re.I,
)
_FEED = re.compile(rb"<(?:rss|feed|rdf:RDF)[\s>]", re.I)
_BY_HEADER: dict[str, Kind] = {
    "text/html": "html",
    "application/xhtml+xml": "html",
    "application/rss+xml": "feed",
    "application/atom+xml": "feed",
    "application/feed+json": "json",
    "application/json": "json",
    "text/json": "json",
    "text/xml": "xml",
    "application/xml": "xml",
    "text/csv": "csv",
    "text/tab-separated-values": "csv",
    "text/markdown": "markdown",
    "application/pdf": "pdf",
    "application/epub+zip": "epub",
    "application/vnd.oasis.opendocument.text": "odt",
    "application/vnd.oasis.opendocument.presentation": "odp",
    "application/vnd.oasis.opendocument.spreadsheet": "ods",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "pptx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
}
_BY_EXTENSION: dict[str, Kind] = {
    "html": "html",
    "htm": "html",
    "md": "markdown",
    "markdown": "markdown",
    "csv": "csv",
    "tsv": "csv",
    "json": "json",
    "xml": "xml",
    "txt": "text",
}
_OPEN_XML = "application/vnd.openxmlformats-officedocument"
_DOCUMENTS: dict[Kind, str] = {
    "pdf": "application/pdf",
    "docx": f"{_OPEN_XML}.wordprocessingml.document",
    "pptx": f"{_OPEN_XML}.presentationml.presentation",
    "xlsx": f"{_OPEN_XML}.spreadsheetml.sheet",
    "odt": "application/vnd.oasis.opendocument.text",
    "odp": "application/vnd.oasis.opendocument.presentation",
    "ods": "application/vnd.oasis.opendocument.spreadsheet",
    "epub": "application/epub+zip",
}
# Types whose bytes are no text: their raw text is that of the extraction.
DOCUMENT_TYPES = frozenset(_DOCUMENTS.values())
_MIME: dict[Kind, str] = {
    "html": "text/html",
    "feed": "application/xml",
    "json": "application/json",
    "xml": "application/xml",
    "csv": "text/csv",
    "markdown": "text/markdown",
    "text": "text/plain",
}


def extract_document(
    body: bytes,
    url_text: str | None,
    content_type: str | None,
    options: HtmlOptions,
    limits: Limits | None = None,
) -> Extraction:
    """See `deepinfer_search_fetch.extract.extract`; `limits` bound documents (PDF, office)."""
    url = urls.parse(url_text) if url_text else None
    kind = sniff(body, content_type, url)
    if kind in _DOCUMENTS:
        return _from_document(body, kind, url, content_type, options, limits or Limits())
    if kind == "binary":
        found = magic_type(body) or (content_type or "").partition(";")[0] or "unknown"
        raise ContentError(
            "unsupported_content_type",
            f"{found} ({len(body)} bytes) holds no text this version can read; "
            "HTML, text, Markdown, JSON, XML, feeds, CSV, PDF, docx, pptx, xlsx, OpenDocument "
            "and EPUB are supported",
            details={"content_type": found, "bytes": len(body)},
        )
    warnings = _mismatch(kind, content_type)
    if len(body) > MAX_TEXT_BYTES:
        body = body[:MAX_TEXT_BYTES]
        warnings.append("page_cut")
    text, charset, source = decode_text(body, content_type, markup=kind in ("html", "feed", "xml"))
    if kind != "html" and len(text) > MAX_CHARS:
        text = text[:MAX_CHARS]
        warnings.append("page_cut")
    if kind == "html":
        result = extract_html(text, url, options)
        meta = result.metadata
        return Extraction(
            content=result.content,
            content_type=_MIME[kind],
            charset=charset,
            charset_source=source,
            page_type=result.page_type,
            quality=round(result.quality, 4),
            title=meta.title,
            author=meta.author,
            site_name=meta.site_name,
            language=meta.language,
            published=meta.published,
            modified=meta.modified,
            description=meta.description,
            canonical_url=meta.canonical_url,
            favicon=meta.favicon,
            noindex=meta.noindex,
            noarchive=meta.noarchive,
            links=result.links,
            images=result.images,
            warnings=list(dict.fromkeys(warnings + result.warnings)),
        )
    if kind == "feed":
        document = feeds.extract_feed(text, url)
    else:
        document = textual.extract_text(text, kind, url)
    return Extraction(
        content=document.content,
        content_type=_MIME[kind],
        charset=charset,
        charset_source=source,
        page_type="listing" if kind == "feed" else "other",
        quality=0.0,
        title=document.title,
        site_name=url.host.removeprefix("www.") if url else None,
        links=document.links,
        warnings=list(dict.fromkeys(warnings + document.warnings)),
        engine=f"deepinfer-{kind}",
    )


def _from_document(
    body: bytes,
    kind: Kind,
    url: urls.Url | None,
    content_type: str | None,
    options: HtmlOptions,
    limits: Limits,
) -> Extraction:
    """A document of a binary format; its readers load only when one comes."""
    if kind == "pdf":
        from deepinfer_search_fetch.extract.pdf import extract_pdf

        document = extract_pdf(body, limits, page_marks=options.page_marks)
    else:
        from deepinfer_search_fetch.extract.office import extract_office

        document = extract_office(body, kind, options, limits)
    return Extraction(
        content=document.content,
        content_type=_DOCUMENTS[kind],
        charset="utf-8",
        charset_source="default",
        page_type="other",
        quality=0.0,
        title=document.title,
        author=document.author,
        published=document.published,
        modified=document.modified,
        site_name=url.host.removeprefix("www.") if url else None,
        links=document.links,
        warnings=_mismatch(kind, content_type) + document.warnings,
        engine=f"deepinfer-{kind}",
    )


def magic_type(body: bytes) -> str | None:
    """MIME type by the first bytes, None for what looks like text."""
    return next((name for magic, name in _MAGIC if body.startswith(magic)), None)


def sniff(body: bytes, content_type: str | None, url: urls.Url | None) -> Kind:
    """The kind of document: its first 4 KiB decide, then the header, then the file extension."""
    magic = magic_type(body)
    if magic == "application/pdf":
        return "pdf"
    if magic == "application/zip":
        return cast(Kind, package_kind(body) or "binary")
    if magic is not None:
        return "binary"
    head = body[:_SNIFF_BYTES]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        head = head[2:].replace(b"\0", b"")
    declared = _BY_HEADER.get((content_type or "").partition(";")[0].strip().lower())
    extension = url.path.rpartition(".")[2].lower() if url and "." in url.path else ""
    by_name = declared or _BY_EXTENSION.get(extension)
    if declared == "pdf" and b"%PDF-" in body[:_PDF_WINDOW]:
        return "pdf"
    if _looks_binary(head):
        return "binary"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if _FEED.search(head) and start.startswith(b"<"):
        return "feed"
    if by_name in ("markdown", "csv", "json", "text"):
        return by_name
    if start.startswith(b"<?xml") and not _HTML.search(head):
        return "xml"
    if _HTML.search(head) and (start.startswith(b"<") or by_name == "html"):
        return "html"
    if start[:1] in (b"{", b"[") and _is_json(body):
        return "json"
    if by_name is not None:
        return by_name
    return "html" if start.startswith(b"<") else "text"


def _looks_binary(head: bytes) -> bool:
    controls = len(head) - len(head.translate(None, _CONTROLS))
    return controls > max(4.0, 0.02 * len(head))


def _is_json(body: bytes) -> bool:
    try:
        if len(body) <= _SNIFF_JSON_BYTES:
            json.loads(body)
    except (ValueError, RecursionError):
        return False
    return body[-64:].rstrip()[-1:] in (b"}", b"]")


def _mismatch(kind: Kind, content_type: str | None) -> list[str]:
    declared = _BY_HEADER.get((content_type or "").partition(";")[0].strip().lower())
    same = declared is None or declared == kind or {declared, kind} == {"xml", "feed"}
    return [] if same else [f"content_type_mismatch:{declared}"]
