"""From a document to the response: the page that was asked for. Costs no more than that page."""

from __future__ import annotations

import hashlib

from deepinfer_search_fetch.errors import ContentError, InvalidRequestError
from deepinfer_search_fetch.extract.document import Document
from deepinfer_search_fetch.extract.tokens import TOKENIZER, paginate
from deepinfer_search_fetch.loading import Loaded
from deepinfer_search_fetch.models import (
    ExtractionInfo,
    FetchRequest,
    FetchResponse,
    Highlight,
    Image,
    Link,
    TokenWindow,
    Usage,
)


def build_response(
    request: FetchRequest,
    loaded: Loaded,
    document: Document,
    highlights: list[Highlight] | None,
    max_tokens: int,
    elapsed_ms: int,
) -> FetchResponse:
    """The page of `document` that the request asks for.

    max_tokens: the server's limit. Raises ContentError(extraction_empty), or
    InvalidRequestError for an offset beyond the end.
    """
    page, extraction, content = loaded.page, document.extraction, document.content
    if not document.pages.chars:
        raise ContentError(
            "extraction_empty",
            "the page holds no readable text",
            details={"warnings": extraction.warnings},
        )
    most = min(request.max_tokens or max_tokens, max_tokens)
    window = paginate(content, request.offset, most, document.pages)
    if request.offset and not window.body:
        raise InvalidRequestError(
            "invalid_argument",
            f"offset {request.offset} is beyond the document's {window.total} tokens",
        )
    source = f"{page.final}\n{document.digest}"
    digest = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()
    return FetchResponse(
        id=f"f_{digest[:24]}",
        url=request.url,
        final_url=str(page.final),
        canonical_url=extraction.canonical_url,
        favicon=extraction.favicon,
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
        if request.format == "links" or request.return_links
        else None,
        images=[Image(url=u, alt=t) for u, t in extraction.images]
        if request.return_images
        else None,
        outline=list(document.outline) if document.outline is not None else None,
        highlights=highlights,
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
