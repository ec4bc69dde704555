"""RSS, Atom and RDF feeds as a list of title, link, date and summary."""

from __future__ import annotations

from typing import Any

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]
from lxml import html as lxml_html

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.extract.hidden import strip_invisible_characters
from deepinfer_search_fetch.extract.inline import escape
from deepinfer_search_fetch.extract.textual import TextDocument

MAX_ENTRIES = 500
MAX_SUMMARY_CHARS = 600


def extract_feed(text: str, url: urls.Url | None) -> TextDocument:
    """A feed as Markdown; never resolves a DTD or an entity."""
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, recover=True, huge_tree=False
    )
    try:
        root = etree.fromstring(strip_invisible_characters(text).encode("utf-8"), parser)
    except (etree.XMLSyntaxError, ValueError):
        root = None
    if root is None:
        return TextDocument("", warnings=["invalid_feed"])
    entries = [e for e in root.iter() if _name(e) in ("item", "entry")]
    title = next(
        (
            _plain(c)
            for e in root.iter()
            if _name(e) in ("channel", "feed")
            for c in e
            if _name(c) == "title"
        ),
        None,
    )
    lines: list[str] = [f"# {escape(title)}\n"] if title else []
    links: list[tuple[str, str]] = []
    for entry in entries[:MAX_ENTRIES]:
        fields = {_name(child): child for child in reversed(entry)}
        heading = _plain(fields.get("title")) or "(untitled)"
        link = _link(entry, url)
        if link:
            links.append((link, heading))
        when = _plain(
            fields.get(
                "published", fields.get("pubDate", fields.get("updated", fields.get("date")))
            )
        )
        summary = _plain(fields.get("summary", fields.get("description", fields.get("content"))))
        label = f"[{escape(heading)}]({link})" if link else escape(heading)
        lines.append(f"- {label}" + (f" ({when})" if when else ""))
        if summary and summary != heading:
            lines.append("  " + escape(_cut(summary)))
    warnings = ["entries_truncated"] if len(entries) > MAX_ENTRIES else []
    return TextDocument("\n".join(lines) + "\n" if lines else "", title, links, warnings)


def _name(element: Any) -> str:
    return etree.QName(element).localname if isinstance(element.tag, str) else ""


def _plain(element: Any) -> str | None:
    """Text of a feed field, HTML inside it reduced to its text."""
    if element is None:
        return None
    raw = "".join(element.itertext()).strip()
    if "<" in raw:
        try:
            raw = str(lxml_html.fragment_fromstring(raw, create_parent=True).text_content())
        except (etree.ParserError, etree.XMLSyntaxError):
            return None
    return " ".join(raw.split()) or None


def _link(entry: Any, url: urls.Url | None) -> str | None:
    for child in entry:
        if _name(child) != "link" or child.get("rel", "alternate") != "alternate":
            continue
        href = child.get("href") or "".join(child.itertext()).strip()
        try:
            return str(urls.join(url, href) if url else urls.parse(href))
        except SearchFetchError:
            return None
    return None


def _cut(text: str) -> str:
    if len(text) <= MAX_SUMMARY_CHARS:
        return text
    return text[:MAX_SUMMARY_CHARS].rsplit(" ", 1)[0] + " …"
