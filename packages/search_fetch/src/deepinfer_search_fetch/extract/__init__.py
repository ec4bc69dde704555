"""HTML and other documents to clean Markdown: `extract_markdown` and the whole `extract`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer_search_fetch.models import CharsetSource, Mode, PageType

if TYPE_CHECKING:
    from deepinfer_search_fetch.extract.html import HtmlOptions

ENGINE = "deepinfer-blocks"
ENGINE_VERSION = "2"


@dataclass(frozen=True, slots=True)
class Extraction:
    """One document, cleaned.

    content: Markdown, "" if nothing was found. links: (absolute URL, text) in document order;
    images: (absolute URL, alternative text) in the content's part of the page.
    quality: expected word F1 of the choice, 0..1 (0 where no choice was made). Absent metadata is
    None. The same bytes, URL and options always give the same record.
    """

    content: str
    content_type: str
    charset: str
    charset_source: CharsetSource
    page_type: PageType
    quality: float
    title: str | None = None
    author: str | None = None
    site_name: str | None = None
    language: str | None = None
    published: str | None = None
    modified: str | None = None
    description: str | None = None
    canonical_url: str | None = None
    favicon: str | None = None
    noindex: bool = False
    noarchive: bool = False
    links: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    images: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[str] = field(default_factory=list[str])
    engine: str = ENGINE
    version: str = ENGINE_VERSION


def extract(
    html: bytes,
    url: str | None = None,
    *,
    content_type: str | None = None,
    mode: Mode = "article",
    options: HtmlOptions | None = None,
) -> Extraction:
    """Clean one document of any supported type (HTML, text, Markdown, JSON, feeds, CSV, XML, PDF,
    docx, pptx, xlsx, OpenDocument, EPUB).

    html: the raw bytes. url: where they came from; links resolve against it. content_type: the
    HTTP header, if any; the bytes are sniffed first. mode: "article" (main content), "full"
    (everything visible), "fast" (the quick extractor). options: finer wishes, override `mode`.

    Raises ContentError(unsupported_content_type) for images, archives and the like,
    (feature_unavailable) for a PDF without the [docs] extra, LimitError for a document bomb,
    InvalidRequestError for a malformed URL or selector.
    """
    from deepinfer_search_fetch.extract.dispatch import extract_document
    from deepinfer_search_fetch.extract.html import HtmlOptions as Options

    return extract_document(html, url, content_type, options or Options(mode=mode))


def extract_markdown(html: bytes, url: str | None = None) -> str:
    """The main content of a page as Markdown, "" if there is none."""
    return extract(html, url).content
