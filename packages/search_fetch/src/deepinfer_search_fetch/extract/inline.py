"""Inline content to Markdown: emphasis, code, links, images, formulas, and the few escapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lxml import html

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.extract.normalise import MATH_TAG
from deepinfer_search_fetch.extract.tree import APART, InlineItem, apart

ImageMode = Literal["alt", "none", "url"]

_STRONG = frozenset({"b", "strong"})
_EMPHASIS = frozenset({"em", "i", "cite", "dfn", "var"})
_CODE = frozenset({"code", "kbd", "samp", "tt"})
_SKIPPED = frozenset({"rp", "wbr", "input", "area", "map", "audio", "video", "source", "track"})
_DECORATIVE = re.compile(
    r"^(?:image|img|icon|logo|photo|avatar|thumbnail|spacer|banner)?\.?$", re.I
)
_MAIL = re.compile(r"mailto:[^\s<>()]+$", re.I)
# Encoding a name or path beyond ASCII takes five times as long; no page has so many to encode.
_MAX_UNICODE_TARGETS = 20_000
_SPACE = re.compile(r"[ \t\r\n\f\u00a0]+")
_UNEVEN = re.compile(r"[\t\r\n\f\u00a0]|  ")


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """base: the URL that links resolve against; None leaves relative links as plain text.

    resolved: the targets of this page resolved so far; pages repeat theirs, and the list of links
    asks for every one again.
    """

    base: urls.Url | None = None
    links: bool = True
    images: ImageMode = "alt"
    tables: bool = True
    resolved: dict[str, str | None] = field(
        default_factory=dict[str, str | None], compare=False, repr=False
    )


@dataclass(slots=True)
class InlineWriter:
    """Renders runs; `notes` maps the id of a footnote's text to its number."""

    options: WriterOptions
    notes: dict[str, str] = field(default_factory=dict)

    def render(self, items: Sequence[InlineItem], href: str | None = None) -> str:
        """One run as Markdown, `\\n` for line breaks inside it.

        href: the link the whole run lies in (its box is inside an <a>).
        """
        text = _tidy(self._children(items))
        if href is not None:
            text = self._link(text, href)
        return text

    def _children(self, items: Sequence[InlineItem]) -> str:
        out: list[str] = []
        previous: html.HtmlElement | None = None
        after_picture = False
        for item in items:
            if isinstance(item, str):
                text = escape(_SPACE.sub(" ", item) if _UNEVEN.search(item) else item)
                out.append(" " + text if after_picture and text[:1].isalnum() else text)
                previous, after_picture = None, False
                continue
            piece = self._element(item)
            if previous is not None and apart(previous, item):
                out.append(" ")
            is_picture = item.tag == "img" and bool(piece)
            if is_picture and piece[:1].isalnum() and out and out[-1][-1:].isalnum():
                out.append(" ")  # words of a picture are not glued to those around it
            elif after_picture and piece[:1].isalnum():
                out.append(" ")
            out.append(f" {piece} " if APART in item.attrib else piece)
            previous, after_picture = item, is_picture and piece[-1:].isalnum()
        return "".join(out)

    def _inner(self, element: html.HtmlElement) -> str:
        items: list[InlineItem] = [element.text] if element.text else []
        for child in element:
            items.append(child)
            if child.tail:
                items.append(child.tail)
        return self._children(items)

    def _element(self, element: html.HtmlElement) -> str:
        tag = element.tag
        if tag == "br":
            return "\n"
        if tag in _SKIPPED or not isinstance(tag, str):
            return ""
        if tag == "a":
            return self._anchor(element)
        if tag in _STRONG:
            return _wrap(self._inner(element), "**")
        if tag in _EMPHASIS:
            return _wrap(self._inner(element), "*")
        if tag in _CODE:
            return code_span("".join(element.itertext()))
        if tag == "img":
            return self._image(element)
        if tag == MATH_TAG:
            text = element.text or ""
            return f"$${text}$$" if element.get("data-display") == "1" else f"${text}$"
        if tag == "rt":
            inner = self._inner(element)
            return f"({inner})" if inner.strip() else ""
        if tag == "sup":
            return self._superscript(element)
        if tag == "q":
            return f"“{self._inner(element)}”"
        if element.get("data-task"):
            return element.text or ""
        return self._inner(element)

    def _superscript(self, element: html.HtmlElement) -> str:
        note = self._note(element)
        if note is not None:
            return note
        inner = self._inner(element)
        return (
            f"^{inner.strip()}"
            if re.fullmatch(r"\s*[-+−]?\d+\s*", inner) and not len(element)  # noqa: RUF001
            else inner
        )

    def _note(self, element: html.HtmlElement) -> str | None:
        anchor = element if element.tag == "a" else element.find(".//a")
        if anchor is None:
            return None
        number = self.notes.get((anchor.get("href") or "").removeprefix("#"))
        return f"[^{number}]" if number else None

    def _anchor(self, element: html.HtmlElement) -> str:
        note = self._note(element) if self.notes else None
        if note is not None:
            return note
        inner = self._inner(element)
        href = element.get("href")
        if href is None or not self.options.links:
            return inner
        stripped = inner.strip()
        linked = self._link(_tidy(inner).replace("\n", " "), href)
        lead = " " if inner[:1].isspace() else ""
        tail = " " if inner[-1:].isspace() and stripped else ""
        return lead + linked + tail

    def _link(self, text: str, href: str) -> str:
        target = self.resolve(href)
        if target is None or not text or not self.options.links:
            return text
        return f"[{text}]({target})"

    def resolve(self, href: str) -> str | None:
        """Absolute, cleaned link target; None for what leads nowhere outside the page."""
        href = href.strip()
        known = self.options.resolved
        if href not in known:
            dear = len(known) >= _MAX_UNICODE_TARGETS and not href.isascii()
            known[href] = None if dear else _resolve(self.options.base, href)
        return known[href]

    def _image(self, element: html.HtmlElement) -> str:
        mode = self.options.images
        if mode == "none":
            return ""
        alt = " ".join((element.get("alt") or "").split())
        if mode == "alt":
            return escape(alt) if alt and not _DECORATIVE.match(alt) else ""
        source = image_source(element)
        target = self.resolve(source) if source else None
        return f"![{escape(alt)}]({target})" if target else escape(alt)


def _resolve(base: urls.Url | None, href: str) -> str | None:
    if not href or href.startswith("#"):
        return None
    if _MAIL.match(href):
        return href
    try:
        url = urls.join(base, href) if base is not None else urls.parse(href)
    except SearchFetchError:
        return None
    if url.fragment and base is not None and (url.target, url.origin) == (base.target, base.origin):
        return None
    text = urls.strip_tracking(str(url))
    return text.replace("(", "%28").replace(")", "%29").replace(" ", "%20")


def image_source(element: html.HtmlElement) -> str | None:
    """The best source of an image: lazy attributes first, the largest of a srcset, no data URL."""
    for name in ("data-src", "data-lazy-src", "data-original"):
        value = (element.get(name) or "").strip()
        if value and not value.startswith("data:"):
            return value
    best: tuple[float, str] | None = None
    for candidate in (element.get("srcset") or element.get("data-srcset") or "").split(", "):
        source, _, size = candidate.strip().partition(" ")
        number = re.match(r"(\d+(?:\.\d+)?)[wx]", size)
        weight = float(number.group(1)) if number else 1.0
        if source and not source.startswith("data:") and (best is None or weight > best[0]):
            best = (weight, source)
    if best is not None:
        return best[1]
    source = (element.get("src") or "").strip()
    return source if source and not source.startswith("data:") else None


def code_span(text: str) -> str:
    """Inline code with as many backticks as needed."""
    text = " ".join(text.split())
    if not text:
        return ""
    longest = max((len(m) for m in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


_ESCAPES = re.compile(
    r"\\(?=[!-/:-@\[-`{-~])"  # a backslash that would escape the next character
    r"|(?<!\s)\*|\*(?!\s|$)"
    r"|(?<![^\W_])_(?=\S)|(?<=\S)_(?![^\W_])"
    r"|`|<(?=[A-Za-z/!?])"
    r"|\[(?=[^\[\]]{0,200}\]\()|~(?=~)|&(?=[a-zA-Z]{2,8};|#\d{1,6};)"
)


_SPECIAL = re.compile(r"[\\*_`<\[~&]")


def escape(text: str) -> str:
    """Backslashes only where plain text would otherwise turn into markup."""
    if not _SPECIAL.search(text):
        return text
    return _ESCAPES.sub(lambda m: "\\" + m.group(), text)


_LINE_START = re.compile(r"^(?:([#>]|[-+](?=\s|$)|=+\s*$|-{2,}\s*$)|(\d{1,9})([.)])(?=\s|$))", re.M)


def escape_line_starts(text: str) -> str:
    """Keep a paragraph a paragraph: no accidental headings, quotes, lists or rules."""

    def protect(match: re.Match[str]) -> str:
        if match.group(1):
            return "\\" + match.group(1)
        return f"{match.group(2)}\\{match.group(3)}"

    return _LINE_START.sub(protect, text)


def _wrap(inner: str, marker: str) -> str:
    """Emphasis hugging its text: outer blanks move outside, nested equal marks are not doubled."""
    core = inner.strip()
    if not core or "\n\n" in core or marker in core or not re.search(r"\w", core):
        return inner
    lead = " " if inner[0].isspace() else ""
    tail = " " if inner[-1].isspace() else ""
    return f"{lead}{marker}{core}{marker}{tail}"


_LINE_ENDS = re.compile(r"[ \t]*\n[ \t\n]*")
_BLANKS = re.compile(r"[ \t]{2,}")


def _tidy(text: str) -> str:
    if "\n" in text:
        text = _LINE_ENDS.sub("\n", text)
    if "  " in text or "\t" in text:
        text = _BLANKS.sub(" ", text)
    return text.strip()
