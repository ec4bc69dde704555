"""Office documents and books: each becomes simple HTML, which the page writer turns to Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.docx import docx_html
from deepinfer_search_fetch.extract.epub import epub_html
from deepinfer_search_fetch.extract.html import HtmlOptions, extract_html
from deepinfer_search_fetch.extract.odf import odf_html
from deepinfer_search_fetch.extract.package import Package, local
from deepinfer_search_fetch.extract.pptx import pptx_html
from deepinfer_search_fetch.extract.textual import TextDocument
from deepinfer_search_fetch.extract.xlsx import xlsx_html

# kind -> reader; a reader returns HTML and warnings.
_READERS: dict[str, Callable[[Package, Limits], tuple[str, list[str]]]] = {
    "docx": docx_html,
    "pptx": pptx_html,
    "xlsx": xlsx_html,
    "odt": odf_html,
    "odp": odf_html,
    "ods": odf_html,
    "epub": epub_html,
}


def extract_office(body: bytes, kind: str, options: HtmlOptions, limits: Limits) -> TextDocument:
    """The visible text of a document of that kind. Nothing it refers to is requested.

    Raises ContentError(unsupported_content_type) for a damaged, locked or hostile container,
    LimitError for one beyond the limits.
    """
    package = Package(body, limits)
    text, warnings = _READERS[kind](package, limits)
    result = extract_html(text, None, replace(options, mode="full"))
    title, author, published, modified = _properties(package)
    return TextDocument(
        result.content,
        title,
        result.links,
        [*warnings, *result.warnings],
        author=author,
        published=published,
        modified=modified,
    )


def _properties(package: Package) -> tuple[str | None, str | None, str | None, str | None]:
    """(title, author, published, modified) from whichever metadata part there is."""
    parts = ["docProps/core.xml", "meta.xml", *package.opf_names()]
    found: dict[str, str] = {}
    for part in parts:
        root = package.tree(part)
        for element in root.iter() if root is not None else ():
            text = " ".join((element.text or "").split())
            if text and not len(element):
                found.setdefault(local(element), text)
    created = found.get("created") or found.get("creation-date") or found.get("date")
    modified = found.get("modified") if created else None
    return (
        found.get("title"),
        found.get("creator") or found.get("initial-creator"),
        created,
        modified,
    )
