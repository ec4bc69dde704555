"""The `fast` mode: one pass of resiliparse's parser and main-content heuristics, then our writer.

What is invisible goes first, by the rules of `hidden`; formulas and checkboxes are not looked into,
and metadata is read from the page's head alone.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from deepinfer_search_fetch.extract.dom import html_parser, parse_html
from deepinfer_search_fetch.extract.hidden import (
    HIDING_RULES_MAX,
    MAX_HIDDEN_SHARE,
    REACHABLE,
    REACHABLE_LEVELS,
    hiding_rules,
    is_math,
    remove_invisible,
    style_hides,
)
from deepinfer_search_fetch.extract.tree import PageTree, build_tree

# What the main-content heuristics print though no browser shows it.
_NEVER_SHOWN = (
    "canvas:not(:empty),applet,datalist,dialog:not([open]),"
    "svg text,svg title,svg desc,svg foreignObject"
)
_NEVER_SHOWN_NAMES = (b"<canvas", b"<applet", b"<datalist", b"<dialog", b"<svg")
_ATTRIBUTE_HIDES = (
    "[hidden]:not([hidden=until-found]):not(:empty),[aria-hidden=true]:not(:empty):not(svg)"
)
_STYLE = re.compile(
    r"""\sstyle\s*=\s*(?:"([^"]{1,2000})"|'([^']{1,2000})'|([^\s>"']{1,2000}))""", re.I
)
_MAX_HIDDEN_NODES = 200


@dataclass(frozen=True, slots=True)
class QuickPage:
    """page: all runs are content. head: <head>, the first <h1> and <base> for the metadata."""

    page: PageTree
    head: html.HtmlElement
    removed: int


def quick_page(text: str) -> QuickPage:
    """Main content of a page's source as the quick heuristics see it."""
    # The parser's own types are those of a compiled module without stubs.
    tree: Any = HTMLTree.parse(text)
    # Byte i stands for character i; looking for a word in bytes takes a tenth of a pattern's time.
    bare = text.encode("ascii", "replace").lower()
    selector = _hiding_selector(tree, text, bare)
    if len(tree.document.query_selector_all(selector)) > _MAX_HIDDEN_NODES:
        return _thorough_page(text)
    if any(name in bare for name in _NEVER_SHOWN_NAMES):
        _remove_never_shown(tree.document)
    removed = _remove_invisible(tree, selector)
    return QuickPage(_main_content(tree), _head(tree), removed)


def _thorough_page(text: str) -> QuickPage:
    """For a page with so many hidden parts that removing them one by one is the slower way."""
    parsed, _ = parse_html(text)
    if parsed is None:
        return QuickPage(build_tree(html.Element("body")), html.Element("html"), 0)
    head = deepcopy(parsed)
    removed = sum(remove_invisible(parsed).values())
    cleaned = str(html.tostring(parsed, encoding="unicode"))
    return QuickPage(_main_content(cleaned), head, removed)


def _main_content(tree: Any) -> PageTree:
    reduced: str = extract_plain_text(
        tree,
        preserve_formatting="minimal_html",
        main_content=True,
        links=True,
        alt_texts=False,
    )
    parsed, _ = parse_html(reduced)
    return build_tree(html.Element("body") if parsed is None else parsed)


def _hiding_selector(tree: Any, text: str, bare: bytes) -> str:
    # The selectors do the work: they name the styles of this page that hide, not all elements
    # with a style.
    selectors = [_ATTRIBUTE_HIDES, *_hiding_styles(text, bare)]
    sheets: Any = tree.document.get_elements_by_tag_name("style")[:]
    for sheet in sheets:
        selectors += hiding_rules(sheet.text or "", sheet.getattr("media"))
    return ",".join(list(dict.fromkeys(selectors))[:HIDING_RULES_MAX])


def _remove_never_shown(document: Any) -> None:
    for node in _found(document, _NEVER_SHOWN):
        if node.parent is not None:
            node.parent.remove_child(node)


def _remove_invisible(tree: Any, selector: str) -> int:
    body = tree.body
    found = _found(tree.document, selector)
    if body is None or not found:
        return 0
    total = max(len(body.text or ""), 1)
    removed = 0
    for node in found:
        if node.parent is None or node.tag in ("html", "body"):
            continue
        chars = len((node.text or "").strip())
        if not chars or chars > MAX_HIDDEN_SHARE * total:
            continue
        if is_math(node.tag, node.getattr("class") or "") or _reachable(node):
            continue
        removed += 1
        node.parent.remove_child(node)
    return removed


def _found(document: Any, selector: str) -> list[Any]:
    # A slice, since every single item would be taken out of a fresh copy of them all.
    return list(document.query_selector_all(selector)[:_MAX_HIDDEN_NODES])


def _hiding_styles(text: str, bare: bytes) -> list[str]:
    """A selector for every distinct inline style of the source that hides its element."""
    hiding = sorted(v for v in _style_values(text, bare) if style_hides(v))
    return [f'[style="{_QUOTED.sub(_escaped, v)}"]' for v in hiding]


def _style_values(text: str, bare: bytes) -> set[str]:
    values: set[str] = set()
    at = bare.find(b"style", 1)
    while at > 0:
        match = _STYLE.match(text, at - 1)
        if match is not None:
            values.add(unescape(match[1] or match[2] or match[3]))
        at = bare.find(b"style", match.end() if match is not None else at + 1)
    return values


# In a CSS string a quote, a backslash and a line break stand as hexadecimal escapes.
_QUOTED = re.compile(r"""["\\\n\r\f]""")


def _escaped(match: re.Match[str]) -> str:
    return f"\\{ord(match.group()):x} "


def _reachable(node: Any) -> bool:
    """As `hidden.remove_invisible` sees tabs and accordions, without the ids of their buttons."""
    for _ in range(REACHABLE_LEVELS):
        if node is None or node.tag in ("body", "html", "#document"):
            return False
        if node.tag == "details" or node.getattr("role") == "tabpanel":
            return True
        if REACHABLE.search(f"{node.getattr('class') or ''} {node.getattr('id') or ''}"):
            return True
        node = node.parent
    return False


def _head(tree: Any) -> html.HtmlElement:
    root = tree.document.query_selector("html")
    language = (root.getattr("lang") if root is not None else None) or ""
    title = tree.document.query_selector("h1")
    source = (
        f'<html lang="{escape(language)}">{tree.head or ""}'
        f"<body><h1>{escape(title.text if title is not None else '')}</h1></body></html>"
    )
    try:
        return html.document_fromstring(source.encode("utf-8", "replace"), parser=html_parser())
    except (etree.ParserError, etree.XMLSyntaxError):
        return html.Element("html")
