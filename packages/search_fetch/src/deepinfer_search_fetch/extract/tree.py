"""The page as boxes and runs: what is kept or dropped, and what the Markdown writer walks.

A *box* is a block-level element. A *run* is a maximal stretch of inline content inside one box,
cut at double line breaks: the smallest unit that extraction decides about.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from lxml import html

_BLOCK_NAMES = """
address article aside blockquote body button caption center dd details dialog dir div dl dt fieldset
figcaption figure footer form frameset h1 h2 h3 h4 h5 h6 header hgroup hr html label legend li main
menu nav noscript ol optgroup option p pre search section select summary table tbody td textarea
tfoot th thead tr ul
"""
BLOCK_TAGS = frozenset(_BLOCK_NAMES.split())
WORD = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff]"
    "|[^\\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af]+"
)

InlineItem = str | html.HtmlElement


@dataclass(slots=True, eq=False)
class Run:
    """Inline content. text: white space collapsed. link_chars: how much of it lies in links."""

    box: Box
    items: list[InlineItem]
    index: int = 0
    text: str = ""
    link_chars: int = 0
    kept: bool = True

    @property
    def tag(self) -> str:
        return self.box.tag


@dataclass(slots=True, eq=False)
class Box:
    """A block-level element; `children` in document order."""

    tag: str
    element: html.HtmlElement
    parent: Box | None
    depth: int
    children: list[Box | Run] = field(default_factory=list)
    kept_runs: int = 0


@dataclass(slots=True, eq=False)
class PageTree:
    """root: the body's box. runs: every run with text, in document order."""

    root: Box
    runs: list[Run]


def build_tree(document: html.HtmlElement) -> PageTree:
    """Boxes and runs of a cleaned document (see `hidden.remove_invisible`)."""
    found = document.find(".//body")
    body = document if found is None else found
    blocky = _elements_with_blocks(body)
    root = Box("body", body, None, 0)
    builder = _Builder(blocky)
    builder.fill(root)
    for index, run in enumerate(builder.runs):
        run.index = index
    return PageTree(root, builder.runs)


def _elements_with_blocks(body: html.HtmlElement) -> set[html.HtmlElement]:
    """Inline elements that contain a block element: they must be treated as boxes."""
    blocky: set[html.HtmlElement] = set()
    for element in body.iter(*BLOCK_TAGS):
        parent = element.getparent()
        while parent is not None and parent.tag not in BLOCK_TAGS and parent not in blocky:
            blocky.add(parent)
            parent = parent.getparent()
    return blocky


class _Builder:
    def __init__(self, blocky: set[html.HtmlElement]) -> None:
        self._blocky = blocky
        self.runs: list[Run] = []

    def fill(self, root: Box) -> None:
        stack: list[tuple[Box, deque[InlineItem | Box]]] = [(root, deque(self._parts(root)))]
        while stack:
            box, parts = stack[-1]
            inline: list[InlineItem] = []
            child: Box | None = None
            while parts:
                part = parts.popleft()
                if isinstance(part, Box):
                    child = part
                    break
                inline.append(part)
            self._add_runs(box, inline)
            if child is None:
                stack.pop()
                continue
            box.children.append(child)
            stack.append((child, deque(self._parts(child))))

    def _parts(self, box: Box) -> list[InlineItem | Box]:
        element = box.element
        parts: list[InlineItem | Box] = [element.text] if element.text else []
        if box.tag == "pre" and not any(c.tag in ("table", "div") for c in element):
            # Preformatted text stays one unit, whatever is marked up inside it.
            parts += [item for c in element for item in ((c, c.tail) if c.tail else (c,))]
            return parts
        for child in element:
            if not isinstance(child.tag, str):
                continue
            if child.tag in BLOCK_TAGS or child in self._blocky:
                parts.append(Box(child.tag, child, box, box.depth + 1))
            else:
                parts.append(child)
            if child.tail:
                parts.append(child.tail)
        return parts

    def _add_runs(self, box: Box, inline: list[InlineItem]) -> None:
        # What stands between two blocks is mostly one stretch of white space.
        if not inline or (len(inline) == 1 and isinstance(inline[0], str) and inline[0].isspace()):
            return
        for items in [inline] if box.tag == "pre" else _split_at_double_breaks(inline):
            text, linked = _measure(items)
            if text:
                link_chars = len(text) if _in_link(box) else min(linked, len(text))
                run = Run(box, items, text=text, link_chars=link_chars)
                self.runs.append(run)
                box.children.append(run)


def _in_link(box: Box | None) -> bool:
    while box is not None and box.tag != "body":
        if box.tag == "a":
            return True
        box = box.parent
    return False


def _split_at_double_breaks(inline: list[InlineItem]) -> list[list[InlineItem]]:
    groups: list[list[InlineItem]] = [[]]
    breaks = 0
    for item in inline:
        if not isinstance(item, str) and item.tag == "br":
            breaks += 1
            if breaks == 2:
                groups.append([])
            elif breaks == 1:
                groups[-1].append(item)
            continue
        if not isinstance(item, str) or item.strip():
            breaks = 0
        groups[-1].append(item)
    return groups


def _measure(items: list[InlineItem]) -> tuple[str, int]:
    """Text of the items, white space collapsed, and characters of it in links among them."""
    texts: list[str] = []
    linked = 0
    previous: html.HtmlElement | None = None
    for item in items:
        if isinstance(item, str):
            texts.append(item)
            previous = None
            continue
        if previous is not None and apart(previous, item):
            texts.append(" ")
        previous = item
        drawn_apart = APART in item.attrib
        if drawn_apart:
            texts.append(" ")
        linked += _append_text(item, texts)
        if drawn_apart:
            texts.append(" ")
    return _collapse("".join(texts)), linked


def _append_text(element: html.HtmlElement, texts: list[str]) -> int:
    """Add the element's text, blanks where siblings are apart; returns characters inside links."""
    start = len(texts)
    if element.tag == "br":
        texts.append(" ")
    if element.text:
        texts.append(element.text)
    linked = 0
    previous: html.HtmlElement | None = None
    for child in element:
        if previous is not None and not previous.tail and apart(previous, child):
            texts.append(" ")
        previous = child
        drawn_apart = APART in child.attrib
        if drawn_apart:
            texts.append(" ")
        linked += _append_text(child, texts)
        if drawn_apart:
            texts.append(" ")
        if child.tail:
            texts.append(child.tail)
    if element.tag == "a":
        return len(_collapse("".join(texts[start:])))
    return linked


APART = "data-drawn-apart"
"""Marks an inline element that the page's style draws as a block."""
_APART_TAGS = frozenset({"a", "span", "time", "small"})


def apart(left: html.HtmlElement, right: html.HtmlElement) -> bool:
    """Whether two inline siblings without white space between them are drawn apart.

    Links side by side are; so are classed spans that both hold whole Latin words. CJK never is.
    What a style makes a block (see `hidden`) always is.
    """
    if APART in left.attrib or APART in right.attrib:
        return True
    if left.tag not in _APART_TAGS or right.tag not in _APART_TAGS:
        return False
    if not (left.get("class") and right.get("class")) and not (left.tag == right.tag == "a"):
        return False
    before = "".join(left.itertext()).rstrip("\n")
    after = "".join(right.itertext())
    return (
        len(before) > 1
        and len(after) > 1
        and before[-1].isalnum()
        and after[0].isalnum()
        and before[-1] < "\u2e80"
        and after[0] < "\u2e80"
    )


def _collapse(text: str) -> str:
    return " ".join(text.split())


def words(text: str) -> list[str]:
    """Lower-cased words; every CJK character is a word of its own."""
    return WORD.findall(text.lower())
