"""From an extraction to the response: format, paging, highlights."""

from __future__ import annotations

import hashlib

from deepinfer_search_fetch.errors import ContentError, InvalidRequestError
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.extract.dispatch import DOCUMENT_TYPES
from deepinfer_search_fetch.extract.tokens import TOKENIZER, count_tokens, paginate
from deepinfer_search_fetch.loading import Loaded
from deepinfer_search_fetch.models import (
    ExtractionInfo,
    FetchRequest,
    FetchResponse,
    Highlight,
    Link,
    TokenWindow,
    Usage,
)
from deepinfer_search_fetch.net.charset import decode_text
from deepinfer_search_fetch.net.transport import Response
from deepinfer_search_fetch.present import outline, to_html, to_text


def build_response(
    request: FetchRequest,
    loaded: Loaded,
    extraction: Extraction,
    max_tokens: int,
    elapsed_ms: int,
) -> FetchResponse:
    """The page of `extraction` that the request asks for.

    max_tokens: the server's limit. Raises ContentError(extraction_empty), or
    InvalidRequestError for an offset beyond the end.
    """
    page = loaded.page
    markdown = extraction.content
    content = _format(request, extraction, page.response)
    if not content.strip():
        raise ContentError(
            "extraction_empty",
            "the page holds no readable text",
            details={"warnings": extraction.warnings},
        )
    window = paginate(content, request.offset, min(request.max_tokens or max_tokens, max_tokens))
    if request.offset and not window.body:
        raise InvalidRequestError(
            "invalid_argument",
            f"offset {request.offset} is beyond the document's {window.total} tokens",
        )
    digest = hashlib.sha256(f"{page.final}\n{content}".encode("utf-8", "replace")).hexdigest()
    return FetchResponse(
        id=f"f_{digest[:24]}",
        url=request.url,
        final_url=str(page.final),
        canonical_url=extraction.canonical_url,
        status=page.response.status,
        redirects=list(page.hops),
        content_type=extraction.content_type,
        charset=extraction.charset,
        charset_source=extraction.charset_source,
        title=extraction.title,
        author=extraction.author,
        site_name=extraction.site_name,
        language=extraction.language,
        published=extraction.published,
        modified=extraction.modified,
        description=extraction.description,
        content=window.text,
        format=request.format,
        page_type=extraction.page_type,
        tokens=TokenWindow(
            returned=window.returned,
            total=window.total,
            offset=request.offset,
            next_offset=window.next_offset,
            tokenizer=TOKENIZER,
        ),
        truncated=window.next_offset is not None,
        links=[Link(url=u, text=t) for u, t in extraction.links]
        if request.format == "links"
        else None,
        outline=outline(markdown) if request.format == "outline" else None,
        highlights=_highlights(markdown, request.query) if request.query else None,
        extraction=ExtractionInfo(
            engine=extraction.engine,
            version=extraction.version,
            rendered=loaded.rendered,
            quality=extraction.quality,
            warnings=[*loaded.warnings, *extraction.warnings],
        ),
        cache=loaded.cache,
        robots=loaded.robots,
        usage=Usage(billable=True, unit="fetch", quantity=1),
        elapsed_ms=elapsed_ms,
    )


def _format(request: FetchRequest, extraction: Extraction, response: Response) -> str:
    markdown = extraction.content
    if request.format == "text":
        return to_text(markdown)
    if request.format == "html":
        return to_html(markdown)
    if request.format == "raw_text":
        if extraction.content_type in DOCUMENT_TYPES:
            return to_text(markdown)
        return decode_text(response.body, response.header("content-type"))[0]
    if request.format == "outline":
        return "".join(f"{'  ' * (e.level - 1)}- {e.title}\n" for e in outline(markdown))
    if request.format == "links":
        return "".join(f"- [{text}]({link})\n" for link, text in extraction.links)
    return markdown


def _highlights(markdown: str, query: str) -> list[Highlight]:
    """The three paragraphs that hold most of the query's terms, best first."""
    from deepinfer_search_fetch.index.analyzers import terms

    wanted = set(terms(query))
    scored: list[tuple[float, int, str]] = []
    for number, block in enumerate(to_text(markdown).split("\n\n")):
        text = " ".join(block.split())
        found = wanted.intersection(terms(text))
        if found:
            scored.append(
                (len(found) / len(wanted) - 0.001 * count_tokens(text) ** 0.5, number, text)
            )
    best = sorted(scored, key=lambda item: (-item[0], item[1]))[:3]
    return [Highlight(text=text[:600], score=round(max(score, 0.0), 4)) for score, _, text in best]
