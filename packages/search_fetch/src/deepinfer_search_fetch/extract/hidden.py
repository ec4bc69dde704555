"""Removes what a reader of the page cannot see: a favourite place for injected instructions.

One filter on one tree, for every mode. An element goes when its computed style shows nothing of it
(`visibility`), when an attribute hides it (hidden, aria-hidden, inert, popover, closed dialogs), or
when its class is one of those that hide text for screen readers. What a click opens is not hidden:
`details`, and the parts of tabs and accordions that a control of the page names or stands before.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice

from lxml import html

from deepinfer_search_fetch.extract.stylesheets import Sheets, read_sheets
from deepinfer_search_fetch.extract.tree import APART, BLOCK_TAGS
from deepinfer_search_fetch.extract.visibility import State, own_style, step, unseen_text

# Never shown, or shown as something else than the text inside.
_DROP_TAGS = (
    "script", "style", "template", "noscript", "iframe", "object", "embed", "applet", "canvas",
    "svg", "datalist", "dialog", "audio", "video", "noframes", "noembed", "frameset", "progress",
    "meter", "param", "area", "input",
)  # fmt: skip
_COLLAPSIBLE = re.compile(
    r"accordion|collaps|tab-?(?:pane|panel|content)|expand|toggle|faq|spoiler|read-?more|panel"
    r"|dropdown|drawer|answer",
    re.I,
)
_MATH = re.compile(r"katex|mathjax|mjx", re.I)
# Text for screen readers alone. It repeats what the page shows, or names controls: dropped.
_SCREEN_READER_NAMES = """
sr-only visually-hidden visuallyhidden visually-hidden-focusable sr-only-focusable
screen-reader-text screen-reader-only screenreader-only screenreader u-visually-hidden a11y-hidden
assistive-text hidden-accessible ui-helper-hidden-accessible show-for-sr element-invisible
"""
_SCREEN_READER = frozenset(_SCREEN_READER_NAMES.split())
# Parts that a script fades in when the reader scrolls to them, by the marks of such scripts.
_REVEALED = ("data-aos", "data-w-id", "data-sr-id", "data-sal", "data-scroll-reveal")
_CONTROLS = frozenset({"button", "summary"})
_HEADINGS = frozenset({"h2", "h3", "h4", "h5", "h6", "dt"})
_CONTROL_ELEMENTS = 40
_CONTROL_REACH = 3  # how many siblings in front of a part its control may stand
_REACHABLE_LEVELS = 5
_SHELL_SHARE = 0.5
_BLOCK_DISPLAYS = frozenset({"block", "flex", "grid", "table", "list-item", "flow-root"})
_NOSCRIPT_CHARS = 400
_NOSCRIPT_ELEMENTS = 5
_ANY_TAB = "boolean(descendant-or-self::*[@role = 'tab'])"
_ROOT_IDS = frozenset({"root", "app", "__next", "__nuxt", "react-root", "application"})


def remove_invisible(tree: html.HtmlElement) -> dict[str, int]:
    """Drop invisible elements in place; returns counts by reason ("css", "attribute", …)."""
    return _Filter(tree).run()


class _Filter:
    def __init__(self, tree: html.HtmlElement) -> None:
        self._tree = tree
        _open_shadow_roots(tree)
        self._sheets: Sheets = read_sheets(tree)
        self._controlled = _controlled_ids(tree)
        self._has_tabs = bool(tree.xpath(_ANY_TAB))
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._doomed: list[tuple[html.HtmlElement, str]] = []
        _open_noscript(tree)

    def run(self) -> dict[str, int]:
        for element in list(self._tree.iter(*_DROP_TAGS)):
            self._drop_unshown(element)
        self._walk()
        self._total = visible_chars(self._tree) if self._doomed else 0
        for element, reason in self._doomed:
            if element.getparent() is None:
                continue
            chars = visible_chars(element)
            if reason != "attribute" and self._is_shell(element, chars):
                continue
            if chars:
                self._counts[reason] += 1
            self._total -= chars
            element.drop_tree()
        return dict(self._counts)

    def _drop_unshown(self, element: html.HtmlElement) -> None:
        parent = element.getparent()
        if parent is None or (element.tag == "dialog" and "open" in element.attrib):
            return
        element.drop_tree()

    def _walk(self) -> None:
        """Every element with the state its ancestors hand down, in document order."""
        stack = [(self._tree, State(back=self._canvas()), False)]
        sheets = self._sheets
        every = "*" in sheets.simple
        while stack:
            element, state, unseen = stack.pop()
            if every or element.attrib or element.tag in sheets.simple or element in sheets.matched:
                hidden, below = self._look(element, state)
                if hidden:
                    continue
                if below is not state:
                    state, unseen = below, unseen_text(below)
            if unseen:
                self._blank(element)
            stack.extend((c, state, unseen) for c in reversed(element) if isinstance(c.tag, str))

    def _canvas(self) -> tuple[float, float, float] | None:
        # A linked sheet may paint the page in any colour.
        return None if self._sheets.linked else (1.0, 1.0, 1.0)

    def _look(self, element: html.HtmlElement, state: State) -> tuple[bool, State]:
        reason = self._by_attribute(element)
        style = own_style(element, self._sheets)
        below = state
        if style is not None:
            below, by_css = step(state, style, self._sheets)
            drawn = style.get("display") in _BLOCK_DISPLAYS or style.get("float") == "right"
            if drawn and element.tag not in BLOCK_TAGS:
                element.set(APART, "1")
            reason = reason or by_css
            if state.visible and not below.visible and self._reachable(element):
                below.visible = True
            if reason == "css" and _is_revealed(element):
                below.opacity, reason = state.opacity, None
        if element.tag in ("html", "body"):
            # A page that fades itself in starts with all of it unseen.
            below.visible, below.opacity = True, 1.0
            return False, below
        if reason == "closed" and self._reachable(element):
            reason = None
        if reason is not None:
            self._doomed.append((element, "attribute" if reason == "attribute" else "css"))
            return True, below
        return False, below

    def _blank(self, element: html.HtmlElement) -> None:
        """Take the text out of an element; what stands in elements of its own is looked at too."""
        taken = [element.text, *(child.tail for child in element)]
        if any(text and text.strip() for text in taken):
            self._counts["css"] += 1
        element.text = None
        element.attrib.pop("alt", None)
        for child in element:
            child.tail = None

    def _by_attribute(self, element: html.HtmlElement) -> str | None:
        attributes = element.attrib
        if attributes.get("aria-hidden", "").strip().lower() == "true" and not is_math(
            element.tag, attributes.get("class") or ""
        ):
            return None if self._reachable(element) else "attribute"
        if "inert" in attributes:
            return "attribute"
        classes = attributes.get("class")
        if classes:
            named = _SCREEN_READER.intersection(classes.split())
            if named and not is_math(element.tag, classes):
                return "attribute"
        return None

    def _is_shell(self, element: html.HtmlElement, chars: int) -> bool:
        """Whether this is the page itself, hidden until its script runs: most of its text, with
        the page's main heading or in the position an animation begins with."""
        if chars <= _SHELL_SHARE * self._total:
            return False
        style = element.get("style") or ""
        if element.tag == "main" or ("opacity" in style and "transform" in style):
            return True
        return next(element.iter("h1", "main", "article"), None) is not None

    def _reachable(self, element: html.HtmlElement) -> bool:
        """Whether a control of the page opens this: it names the part, or stands before it."""
        current: html.HtmlElement | None = element
        for _ in range(_REACHABLE_LEVELS):
            if current is None or current.tag == "body":
                return False
            if current.tag == "details" or (current.get("id") or "") in self._controlled:
                return True
            named = f"{current.get('class') or ''} {current.get('id') or ''}"
            if self._has_tabs and current.get("role") == "tabpanel":
                return True
            if _COLLAPSIBLE.search(named) and _has_control(current):
                return True
            current = current.getparent()
        return False


def _is_revealed(element: html.HtmlElement) -> bool:
    return any(name in element.attrib for name in _REVEALED)


def _open_noscript(tree: html.HtmlElement) -> None:
    """A page that draws itself by script may bring its whole text along in `noscript`."""
    blocks = [(b, visible_chars(b)) for b in tree.iter("noscript")]
    if not any(chars >= _NOSCRIPT_CHARS for _, chars in blocks):
        return
    drawn = any(e.get("id") in _ROOT_IDS and not visible_chars(e) for e in tree.iter("div"))
    unseen = sum(visible_chars(e) for e in tree.iter("script", "style", "template", "title"))
    outside = visible_chars(tree) - unseen - sum(chars for _, chars in blocks)
    for block, chars in blocks:
        page_like = drawn or sum(1 for _ in block.iterdescendants()) >= _NOSCRIPT_ELEMENTS
        if page_like and chars >= max(_NOSCRIPT_CHARS, outside):
            block.tag = "div"


def _has_control(element: html.HtmlElement) -> bool:
    """Whether something that is clicked stands before the part, or before what wraps it."""
    for current in (element, element.getparent()):
        before = current
        for _ in range(_CONTROL_REACH):
            before = None if before is None else before.getprevious()
            if before is None:
                break
            inside = islice(before.iter(), _CONTROL_ELEMENTS)
            if before.tag in _HEADINGS or any(_is_control(e) for e in inside):
                return True
    return False


def _is_control(element: html.HtmlElement) -> bool:
    if not isinstance(element.tag, str):
        return False
    if element.tag in _CONTROLS or element.get("role") in ("button", "tab"):
        return True
    if "aria-expanded" in element.attrib or "onclick" in element.attrib:
        return True
    href = element.get("href")
    opens = href is not None and href.strip().lower().startswith(("#", "javascript:"))
    return (element.tag == "a" and opens) or (element.tag == "label" and "for" in element.attrib)


def _controlled_ids(tree: html.HtmlElement) -> frozenset[str]:
    """Ids of the parts that a button or tab of the page opens."""
    found: set[str] = set()
    for element in tree.iter("button", "a", "summary", "div", "li", "span", "h2", "h3", "h4"):
        if not element.attrib:
            continue
        for name in ("aria-controls", "data-bs-target", "data-target"):
            if value := element.get(name):
                found.update(v.removeprefix("#") for v in value.split()[:8])
        if element.tag == "a" and element.get("role") == "tab" and (href := element.get("href")):
            found.add(href.removeprefix("#"))
    return frozenset(found)


def _open_shadow_roots(tree: html.HtmlElement) -> None:
    """A declarative shadow root is what is shown of its host: its template becomes the content,
    and the host's own children are shown where it has a slot for them."""
    for template in list(tree.iter("template")):
        host = template.getparent()
        if "shadowrootmode" not in template.attrib or host is None:
            continue
        slots = next(template.iter("slot"), None) is not None
        if not slots:
            for child in list(host):
                if child is not template:
                    child.drop_tree()
            host.text = None
        template.tag = "div"
        template.attrib.clear()


def is_math(tag: str, classes: str) -> bool:
    return tag == "math" or bool(_MATH.search(classes))


def visible_chars(element: html.HtmlElement) -> int:
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
