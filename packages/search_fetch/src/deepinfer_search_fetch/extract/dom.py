"""HTML text to an lxml tree, within the limits that keep a hostile page cheap."""

from __future__ import annotations

import re

import numpy as np
from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]
from numpy.typing import NDArray
from resiliparse.parse.html import HTMLTree

MAX_TAGS = 80_000
MAX_CHARS = 2_000_000
MAX_ATTRIBUTES = 20
_MANY_CHARS = 500_000  # a smaller page cannot hold enough attributes to hurt
MAX_DEPTH = 250  # libxml2 drops what lies deeper than 256
# Open elements by a count that takes void and unclosed ones for open: pages stay far below it.
_SUSPECT_DEPTH = 2000
_START_TAG = re.compile(r"<[A-Za-z]")
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*)[^<>]*>")
_LONG = 2000
_LONG_TAG = re.compile(r"<[A-Za-z][^<>]{2000,}")
_LONG_VALUE = re.compile(r"""=\s*(?:"[^"]{2000,}"?|'[^']{2000,}'?|[^\s"'>]{2000,})""")
_QUOTED = re.compile(r"""=\s*(?:"[^"]*"|'[^']*')""")
_NEUTRAL_TAG = re.compile(r"</?(?:div|span|font|b|i|em|strong|section)\b[^<>]*>", re.I)
_NOT_NESTING_NAMES = """
area base br col embed hr img input link meta param source track wbr p li dd dt option tr td th
thead tbody tfoot colgroup html head body
"""
_NOT_NESTING = frozenset(_NOT_NESTING_NAMES.split())
_DEEP = 20


def bounded(text: str) -> tuple[str, list[str]]:
    """`text` within the limits of every parser it is given to, and warnings.

    A page of more than MAX_TAGS tags or MAX_CHARS characters is cut there. Huge attribute values
    are emptied; a tag with a hostile number of attributes loses them all. Tags of hostile depth
    are dropped: the parsers take quadratic time on them, or recurse; the text between survives.
    """
    warnings: list[str] = []
    codes = _codes(text)
    text = _shorten(text, _long_tags(codes))
    if len(text) > MAX_CHARS:
        text = text[:MAX_CHARS]
        warnings.append("page_cut")
    if text.count("<") > MAX_TAGS:
        for n, tag in enumerate(_START_TAG.finditer(text)):
            if n == MAX_TAGS:
                text = text[: tag.start()]
                warnings.append("too_many_nodes")
                break
    if len(text) > _MANY_CHARS:
        text = _TAG.sub(_without_many_attributes, text)
    # Whatever was changed above was made shorter.
    if _suspect(codes if len(codes) == len(text) else _codes(text)):
        flat = _flatten(text)
        if flat != text:
            return flat, [*warnings, "deep_nesting_flattened"]
    return text, warnings


def _without_long_values(tag: re.Match[str]) -> str:
    short = _LONG_VALUE.sub('=""', tag.group())
    return short if _attributes(short) <= MAX_ATTRIBUTES * 5 else short.split(None, 1)[0]


def _without_many_attributes(tag: re.Match[str]) -> str:
    text = tag.group()
    if len(text) <= 2 * MAX_ATTRIBUTES or _attributes(text) <= MAX_ATTRIBUTES:
        return text
    return f"<{tag.group(1)}{tag.group(2)}>"


def _attributes(tag: str) -> int:
    return len(_QUOTED.sub("", tag).split()) - 1


def _codes(text: str) -> NDArray[np.uint8]:
    """The characters as ASCII, "?" for others: enough to see tags by."""
    return np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)


def _long_tags(codes: NDArray[np.uint8]) -> list[int]:
    """Where a "<" and a letter have neither "<" nor ">" behind them for long."""
    at = np.flatnonzero((codes | 2) == ord(">"))
    at = at[np.diff(at, append=len(codes)) > _LONG]
    letter = codes[at + 1] | 32
    return at[(codes[at] == ord("<")) & (letter >= ord("a")) & (letter <= ord("z"))].tolist()


def _shorten(text: str, starts: list[int]) -> str:
    if not starts:
        return text
    pieces: list[str] = []
    done = 0
    for start in starts:
        match = _LONG_TAG.match(text, start)
        if match is not None:
            pieces += (text[done:start], _without_long_values(match))
            done = match.end()
    return "".join([*pieces, text[done:]])


def _suspect(codes: NDArray[np.uint8]) -> bool:
    at = np.flatnonzero(codes[:-1] == ord("<"))
    if len(at) < _SUSPECT_DEPTH:
        return False
    following = codes[at + 1]
    steps = np.where(following == ord("/"), -1, (following | 32) >= ord("a"))
    return bool(np.cumsum(steps).max() >= _SUSPECT_DEPTH)


def _flatten(text: str) -> str:
    depth = 0

    def keep(tag: re.Match[str]) -> str:
        nonlocal depth
        if tag.group(2).lower() in _NOT_NESTING:
            return tag.group()
        if tag.group(1):
            depth = max(0, depth - 1)
            return tag.group() if depth < _DEEP else " "
        depth += 1
        return tag.group() if depth <= _DEEP else " "

    return _TAG.sub(keep, text)


def parse_html(text: str) -> tuple[html.HtmlElement | None, list[str]]:
    """The tree of `bounded` text without comments and processing instructions, and warnings.

    None when there is no element at all. Deep nesting is flattened by dropping neutral tags, so
    its text survives.
    """
    warnings: list[str] = []
    tree = _parse(text)
    if tree is not None and _TOO_DEEP(tree):
        warnings.append("deep_nesting_flattened")
        tree = _parse(_NEUTRAL_TAG.sub(" ", text))
    return tree, warnings


def _parse(text: str) -> html.HtmlElement | None:
    # Lexbor repairs the markup the way browsers do; libxml2 alone loses whole subtrees of some
    # pages. The detour through text costs about 2 ms.
    repaired = str(HTMLTree.parse(text)).encode("utf-8", "replace")
    try:
        return html.document_fromstring(repaired, parser=html_parser())
    except (etree.ParserError, etree.XMLSyntaxError):
        return None


def html_parser() -> html.HTMLParser:
    """A parser of UTF-8 that leaves out comments and processing instructions.

    All its elements are plain `HtmlElement`: lxml's own choice of a class by tag calls Python
    whenever an element is touched, a tenth of the time of an extraction, for form fields' sake.
    """
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    parser.set_element_class_lookup(_PLAIN_ELEMENTS)
    return parser


_PLAIN_ELEMENTS = etree.ElementDefaultClassLookup(element=html.HtmlElement)


_TOO_DEEP = etree.XPath("boolean(" + "/*" * (MAX_DEPTH + 1) + ")")


def small_number(text: str | None, otherwise: int) -> int:
    """A whole number below a million from an attribute, `otherwise` if the text is none."""
    digits = (text or "").strip()
    short = len(digits) < 7 and digits.isascii() and digits.isdigit()
    return int(digits) if short else otherwise
