"""Removes what a reader of the page cannot see: a favourite place for injected instructions.

Tabs, accordions and `details` are reachable by a click and are not hidden text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]

_DROP_TAGS = (
    "script",
    "style",
    "template",
    "noscript",
    "iframe",
    "object",
    "embed",
    "applet",
    "canvas",
    "svg",
    "datalist",
    "dialog",
)
REACHABLE = re.compile(
    r"accordion|collaps|tab-?(?:pane|panel|content)|expand|toggle|faq|spoiler|read-?more", re.I
)
_MATH = re.compile(r"katex|mathjax|mjx", re.I)
_RULE = re.compile(r"([^{}@]{1,400})\{([^{}]{1,2000})\}")
_COMPOUND = re.compile(r"([a-z][a-z0-9]*)?((?:[.#][A-Za-z_-][\w-]{0,80})*)", re.I)
HIDING_RULES_MAX = 2000
_RULES_A_NAME = 50
_MAX_STYLESHEET = 256 * 1024
_OFFSCREEN = re.compile(
    r"(?:left|top|text-indent|right|margin-left)\s*:\s*-(\d{1,6})(?:\.\d+)?(px|em|rem|%|)"
)
_LENGTH = re.compile(r"(?:^|;)\s*{}\s*:\s*(\d*\.?\d+)\s*(px|em|rem|pt|%|)")
_COLOR = re.compile(r"(?:^|;)\s*(color|background(?:-color)?)\s*:\s*([^;!]+)")
_NAMED_COLORS = {"white": (255, 255, 255), "black": (0, 0, 0), "#fff": (255, 255, 255)}
# A page that shows its content by script starts with it hidden; such a part is not an injection.
MAX_HIDDEN_SHARE = 0.5
_NOSCRIPT_MIN_CHARS = 400
REACHABLE_LEVELS = 5


def remove_invisible(tree: html.HtmlElement) -> dict[str, int]:
    """Drop invisible elements in place; returns counts by reason ("css", "attribute", …)."""
    sheet = _hiding_selectors(tree)
    controlled = _controlled_ids(tree)
    _open_noscript(tree)
    for element in list(tree.iter(*_DROP_TAGS, "input")):
        if element.getparent() is not None and not (
            element.tag == "dialog" and "open" in element.attrib
        ):
            element.drop_tree()
    doomed: list[tuple[html.HtmlElement, str]] = []
    for element in tree.iter(etree.Element):
        reason = _reason(element, sheet, controlled)
        if reason is not None and element.tag not in ("html", "body"):
            doomed.append((element, reason))
    total = max(_visible_chars(tree), 1) if doomed else 1
    counts: dict[str, int] = {}
    for element, reason in doomed:
        chars = _visible_chars(element)
        if chars > MAX_HIDDEN_SHARE * total or element.getparent() is None:
            continue
        if chars:
            counts[reason] = counts.get(reason, 0) + 1
        element.drop_tree()
    return counts


def _open_noscript(tree: html.HtmlElement) -> None:
    """Where the page's text is in `noscript` (it draws itself by script), use that text."""
    blocks = list(tree.iter("noscript"))
    inside = [(block, _visible_chars(block)) for block in blocks]
    if not any(chars >= _NOSCRIPT_MIN_CHARS for _, chars in inside):
        return
    scripts = sum(_visible_chars(e) for e in tree.iter("script", "style", "template", "title"))
    outside = _visible_chars(tree) - scripts - sum(chars for _, chars in inside)
    for block, chars in inside:
        if chars >= max(_NOSCRIPT_MIN_CHARS, outside):
            block.tag = "div"


def _reason(element: html.HtmlElement, sheet: Sheet, controlled: frozenset[str]) -> str | None:
    attributes = element.attrib
    if not attributes and element.tag not in sheet:
        return None
    reason = None
    if ("hidden" in attributes and attributes["hidden"] != "until-found") or (
        attributes.get("aria-hidden") == "true"
        and not is_math(element.tag, attributes.get("class") or "")
    ):
        reason = "attribute"
    elif (style := attributes.get("style")) and style_hides(style):
        reason = "css"
    elif sheet and _matches_sheet(element, sheet):
        reason = "stylesheet"
    return None if reason is None or _reachable(element, controlled) else reason


def _controlled_ids(tree: html.HtmlElement) -> frozenset[str]:
    """Ids of the parts that a button or tab of the page opens."""
    found: set[str] = set()
    for element in tree.iter("button", "a", "summary", "div", "li", "span", "h2", "h3", "h4"):
        for name in ("aria-controls", "data-bs-target", "data-target"):
            if value := element.get(name):
                found.update(v.removeprefix("#") for v in value.split()[:8])
    return frozenset(found)


def style_hides(style: str) -> bool:
    """True if declarations alone make the text invisible."""
    s = style[:4000].lower()
    compact = re.sub(r"\s+", "", s)
    if "display:none" in compact or re.search(r"visibility:(?:hidden|collapse)", compact):
        return True
    if _below(compact, "opacity", 0.05) or _below(compact, "font-size", 2.0):
        return True
    off = _OFFSCREEN.search(compact)
    if off and int(off.group(1)) >= (500 if off.group(2) in ("px", "%", "") else 30):
        return True
    if re.search(r"clip:rect\((?:0(?:px)?|1px)[, ]", compact) or re.search(
        r"clip-path:inset\((?:[5-9]\d|100)%", compact
    ):
        return True
    if "overflow:hidden" in compact and _below(compact, "height", 2.0):
        return True
    return _same_colours(s)


def _below(compact: str, name: str, bound: float) -> bool:
    match = re.search(_LENGTH.pattern.replace("{}", name), compact)
    if match is None or match.group(2) in ("%", "em", "rem"):
        return bool(match and float(match.group(1)) == 0)
    return float(match.group(1)) < bound


def _same_colours(style: str) -> bool:
    colours: dict[str, tuple[int, int, int]] = {}
    for name, value in _COLOR.findall(style):
        rgb = _rgb(value.strip())
        if rgb is not None:
            colours["text" if name == "color" else "back"] = rgb
    if len(colours) < 2:
        return False
    return max(abs(a - b) for a, b in zip(colours["text"], colours["back"], strict=True)) <= 8


def _rgb(value: str) -> tuple[int, int, int] | None:
    if value in _NAMED_COLORS:
        return _NAMED_COLORS[value]
    if match := re.fullmatch(r"#([0-9a-f]{3})", value):
        r, g, b = (int(c * 2, 16) for c in match.group(1))
        return r, g, b
    if match := re.fullmatch(r"#([0-9a-f]{6})", value):
        v = int(match.group(1), 16)
        return v >> 16, (v >> 8) & 255, v & 255
    if match := re.match(r"rgba?\(\s*(\d{1,3})[, ]+(\d{1,3})[, ]+(\d{1,3})", value):
        return int(match.group(1)), int(match.group(2)), int(match.group(3))
    return None


# A compound selector: tag or None, then the classes (".x") and ids ("#x") an element must have.
Compound = tuple[str | None, frozenset[str]]
# By one name of the last compound: the whole chain, last compound first.
Sheet = dict[str, list[tuple[Compound, ...]]]


def _hiding_selectors(tree: html.HtmlElement) -> Sheet:
    """Selectors of tags, classes and ids below each other whose in-page rule hides."""
    found: Sheet = {}
    selectors = (r for s in tree.iter("style") for r in hiding_rules(s.text or "", s.get("media")))
    for selector in islice(selectors, HIDING_RULES_MAX):
        chain = _compounds(selector)
        if chain:
            tag, names = chain[0]
            rules = found.setdefault(min(names) if names else tag or "", [])
            if len(rules) < _RULES_A_NAME and chain not in rules:
                rules.append(chain)
    return found


def hiding_rules(css: str, media: str | None) -> Iterator[str]:
    """Selectors of one in-page stylesheet that make invisible what they match."""
    if media is not None and media not in ("all", "screen"):
        return
    for selectors, declarations in _top_level_rules(css[:_MAX_STYLESHEET]):
        if style_hides(declarations):
            yield from (s for s in selectors.split(",") if _compounds(s))


def _compounds(selector: str) -> tuple[Compound, ...] | None:
    """None where the selector says more than this matcher knows (states, attributes, siblings).

    A child is treated as a descendant: what a page hides one level down it rarely shows at two.
    """
    chain: list[Compound] = []
    for part in selector.replace(">", " ").split():
        match = _COMPOUND.fullmatch(part)
        if match is None or not part:
            return None
        names = re.findall(r"[.#][^.#]+", match.group(2))
        chain.append(((match.group(1) or "").lower() or None, frozenset(names)))
    return tuple(reversed(chain)) or None


def _top_level_rules(css: str) -> Iterator[tuple[str, str]]:
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    depth = 0
    start = 0
    prelude = ""
    for match in re.finditer(r"[{}]", css):
        if match.group() == "{":
            if depth == 0:
                prelude = css[start : match.start()].strip()
                start = match.end()
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                if not prelude.startswith("@"):
                    yield prelude[-400:], css[start : match.start()]
                start = match.end()


def _matches_sheet(element: html.HtmlElement, sheet: Sheet) -> bool:
    for name in (element.tag, *_names(element)):
        for chain in sheet.get(name, ()):
            if _fits(element, chain[0]) and _ancestors_fit(element, chain[1:]):
                return True
    return False


def _names(element: html.HtmlElement) -> list[str]:
    names = ["." + c for c in (element.get("class") or "").split()]
    return [*names, "#" + element.get("id", "")] if element.get("id") else names


def _fits(element: html.HtmlElement, compound: Compound) -> bool:
    tag, names = compound
    return (tag is None or tag == element.tag) and names.issubset(_names(element))


def _ancestors_fit(element: html.HtmlElement, chain: tuple[Compound, ...]) -> bool:
    above = element.getparent()
    for compound in chain:
        while above is not None and not _fits(above, compound):
            above = above.getparent()
        if above is None:
            return False
        above = above.getparent()
    return True


def _reachable(element: html.HtmlElement | None, controlled: frozenset[str]) -> bool:
    """True inside a tab or accordion: its class or id, or that of a near ancestor, says so."""
    for _ in range(REACHABLE_LEVELS):
        if element is None or element.tag == "body":
            return False
        if element.get("role") == "tabpanel" or element.tag == "details":
            return True
        identifier = element.get("id") or ""
        if identifier in controlled or REACHABLE.search(
            f"{element.get('class') or ''} {identifier}"
        ):
            return True
        element = element.getparent()
    return False


def is_math(tag: str, classes: str) -> bool:
    return tag == "math" or bool(_MATH.search(classes))


def _visible_chars(element: html.HtmlElement) -> int:
    return sum(len(text.strip()) for text in element.itertext())


# Characters that carry hidden instructions or reorder what is shown.
_INVISIBLE_CHARS = re.compile(
    "[\u200b\u200e\u200f\u2060\ufeff\u00ad\u202a-\u202e\u2066-\u2069"
    "\U000e0000-\U000e007f\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]"
)
_ASCII = bytes(range(128))
_VARIATION_RUN = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]{3,}")


def strip_invisible_characters(text: str) -> str:
    """Without tag, zero-width (joiners stay), bidi, soft hyphen and private-use code points."""
    if text.isascii():
        return text
    # Most pages hold none: asking their few characters beyond ASCII first is five times cheaper.
    beyond = text.encode("utf-8", "replace").translate(None, _ASCII).decode("utf-8")
    if not (_INVISIBLE_CHARS.search(beyond) or _VARIATION_RUN.search(beyond)):
        return text
    return _VARIATION_RUN.sub("", _INVISIBLE_CHARS.sub("", text))
