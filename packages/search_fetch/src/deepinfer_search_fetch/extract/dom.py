"""HTML text to an lxml tree, within the limits that keep a hostile page cheap."""

from __future__ import annotations

import re

from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]
from resiliparse.parse.html import HTMLTree

MAX_TAGS = 300_000
MAX_DEPTH = 250  # libxml2 drops what lies deeper than 256
_START_TAG = re.compile(r"<[A-Za-z]")
_NEUTRAL_TAG = re.compile(r"</?(?:div|span|font|b|i|em|strong|section)\b[^<>]*>", re.I)


def parse_html(text: str) -> tuple[html.HtmlElement | None, list[str]]:
    """The tree of `text` without comments and processing instructions, and warnings.

    None when there is no element at all. Deep nesting is flattened by dropping neutral tags, so
    its text survives; a page of more than MAX_TAGS tags is cut there.
    """
    warnings: list[str] = []
    if text.count("<") > MAX_TAGS:
        for n, tag in enumerate(_START_TAG.finditer(text)):
            if n == MAX_TAGS:
                text = text[: tag.start()]
                warnings.append("too_many_nodes")
                break
    tree = _parse(text)
    if tree is not None and _deeper_than(tree, MAX_DEPTH):
        warnings.append("deep_nesting_flattened")
        tree = _parse(_NEUTRAL_TAG.sub(" ", text))
    return tree, warnings


def _parse(text: str) -> html.HtmlElement | None:
    # Lexbor repairs the markup the way browsers do; libxml2 alone loses whole subtrees of some
    # pages. The detour through text costs about 2 ms.
    repaired = str(HTMLTree.parse(text)).encode("utf-8", "replace")
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        return html.document_fromstring(repaired, parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError):
        return None


def _deeper_than(tree: html.HtmlElement, limit: int) -> bool:
    depth = 0
    for event, _ in etree.iterwalk(tree, events=("start", "end")):
        depth += 1 if event == "start" else -1
        if depth > limit:
            return True
    return False
