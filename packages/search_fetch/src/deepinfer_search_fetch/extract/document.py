"""One job of an extraction worker: a body in, the finished document out.

Whatever costs time in proportion to the page is done here, away from the event loop: reading,
the other formats, the places where pages of a long document may be cut, passages for a query.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from deepinfer_search_fetch.analyzers import terms
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.extract.dispatch import DOCUMENT_TYPES, extract_document
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.extract.present import outline, to_html, to_text
from deepinfer_search_fetch.extract.scripted import wants_rendering
from deepinfer_search_fetch.extract.tokens import PageTable, count_tokens, page_table
from deepinfer_search_fetch.models import Format, Highlight, OutlineEntry
from deepinfer_search_fetch.net.charset import decode_text

_HIGHLIGHT_CHARS = 200_000  # of a longer document the beginning is searched


@dataclass(frozen=True, slots=True)
class Job:
    """What to make of a body. url: where it came from, "" for a file."""

    url: str
    content_type: str | None
    options: HtmlOptions
    format: Format = "markdown"


@dataclass(frozen=True, slots=True)
class Document:
    """An extraction whose content is in the format asked for.

    digest: SHA-256 of the content, hexadecimal. scripted: little was found, and the page looks
    drawn by script. outline: only for format "outline".
    """

    extraction: Extraction
    pages: PageTable
    digest: str
    scripted: bool = False
    outline: tuple[OutlineEntry, ...] | None = None

    @property
    def content(self) -> str:
        return self.extraction.content


def make_document(body: bytes, job: Job, limits: Limits) -> Document:
    """Extract, and write in the job's format. Raises SearchFetchError."""
    extraction = extract_document(body, job.url or None, job.content_type, job.options, limits)
    scripted = False
    if extraction.content_type == "text/html":
        scripted = wants_rendering(body, job.content_type, len(extraction.content))
    entries = tuple(outline(extraction.content)) if job.format == "outline" else None
    content = _formatted(body, job, extraction, entries)
    digest = hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()
    return Document(
        replace(extraction, content=content), page_table(content), digest, scripted, entries
    )


def _formatted(
    body: bytes, job: Job, extraction: Extraction, entries: tuple[OutlineEntry, ...] | None
) -> str:
    markdown = extraction.content
    if job.format == "text":
        return to_text(markdown)
    if job.format == "html":
        return to_html(markdown)
    if job.format == "raw_text":
        if extraction.content_type in DOCUMENT_TYPES:
            return to_text(markdown)
        return decode_text(body, job.content_type)[0]
    if job.format == "outline":
        return "".join(f"{'  ' * (e.level - 1)}- {e.title}\n" for e in entries or ())
    if job.format == "links":
        return "".join(f"- [{text}]({link})\n" for link, text in extraction.links)
    return markdown


def find_highlights(markdown: str, query: str) -> list[Highlight]:
    """The three paragraphs that hold most of the query's terms, best first."""
    wanted = set(terms(query))
    scored: list[tuple[float, int, str]] = []
    for number, block in enumerate(to_text(markdown[:_HIGHLIGHT_CHARS]).split("\n\n")):
        text = " ".join(block.split())
        found = wanted.intersection(terms(text))
        if found:
            scored.append(
                (len(found) / len(wanted) - 0.001 * count_tokens(text) ** 0.5, number, text)
            )
    best = sorted(scored, key=lambda item: (-item[0], item[1]))[:3]
    return [Highlight(text=text[:600], score=round(max(score, 0.0), 4)) for score, _, text in best]
