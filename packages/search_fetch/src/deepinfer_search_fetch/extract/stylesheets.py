"""In-page CSS as far as it can hide text: sheets, rules, and which elements they match.

tinycss2 reads the syntax (escapes, comments, strings, nesting); cssselect matches what is more than
tags, classes and ids. Linked sheets are not loaded, except those that a data: URL brings along.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

import tinycss2
from cssselect import SelectorError
from cssselect import parse as parse_selector
from lxml import html
from lxml.cssselect import CSSSelector
from resiliparse.parse.html import HTMLTree

MAX_SHEET_CHARS = 256 * 1024
MAX_RULES = 4000
_MAX_COMPLEX = 150
_MAX_RULES_A_NAME = 300
_MAX_NESTING = 4
_MAX_STEPS = 300_000  # of a page, from an element to its ancestors
_NUMBER = "data-number-of-element"
# The window that media rules are asked about: a desktop browser on a bright screen.
WINDOW_PX = (1280.0, 800.0)
_PROPERTIES = """
display visibility opacity font font-size color background background-color clip clip-path
transform translate scale rotate position left right top bottom inset text-indent margin margin-left
margin-top margin-right margin-inline-start width height max-width max-height inline-size block-size
max-inline-size max-block-size overflow overflow-x overflow-y contain filter content-visibility
letter-spacing zoom mask mask-image line-height white-space -webkit-text-fill-color
-webkit-text-security -webkit-transform -webkit-clip-path -webkit-filter -webkit-mask
-webkit-mask-image animation animation-name float
"""
PROPERTIES = frozenset(_PROPERTIES.split())
# What a block must hold to be looked into: a value that can hide, or one that shows again.
_RELEVANT = re.compile(
    r"\\|--|var\(|display|visib|opacity|font|color|background|clip|transform|translate|scale|rotate"
    r"|indent|overflow|filter|letter-spacing|zoom|mask|left|right|top|bottom|inset|margin"
    r"|text-security|animation|height|width|contain|-size|position",
    re.I,
)
_LENGTH_UNITS = {"px": 1.0, "pt": 4 / 3, "pc": 16.0, "in": 96.0, "cm": 37.8, "mm": 3.78, "q": 0.945}


@dataclass(frozen=True, slots=True)
class Declaration:
    """value: lower-case text of the value, escapes resolved, comments dropped."""

    name: str
    value: str
    important: bool


@dataclass(slots=True)
class Rule:
    """One selector of a rule. names: what an element must have for it to be asked at all."""

    selector: str
    declarations: tuple[Declaration, ...]
    specificity: tuple[int, int, int]
    order: int
    chain: tuple[tuple[str, Compound], ...] = ()


@dataclass(frozen=True, slots=True)
class Compound:
    """A tag (None for any) with the classes and ids that an element must have."""

    tag: str | None
    names: frozenset[str]


@dataclass(slots=True)
class Sheets:
    """The rules of a page. linked: whether it has sheets that were not read.

    simple: rules by one name of their last compound. matched: elements that complex selectors
    match, with the rules. keyframes: the last frame of every animation. styles: what was made of
    the same rules before. names: the same for class and id attributes. steps: how many a page may
    still take from elements to ancestors.
    """

    linked: bool = False
    simple: dict[str, list[Rule]] = field(default_factory=dict[str, list[Rule]])
    matched: dict[html.HtmlElement, list[Rule]] = field(
        default_factory=dict[html.HtmlElement, list[Rule]]
    )
    keyframes: dict[str, tuple[Declaration, ...]] = field(
        default_factory=dict[str, tuple[Declaration, ...]]
    )
    styles: dict[tuple[object, ...], dict[str, str]] = field(
        default_factory=dict[tuple[object, ...], dict[str, str]]
    )
    names: dict[tuple[str | None, str | None], frozenset[str]] = field(
        default_factory=dict[tuple[str | None, str | None], frozenset[str]]
    )
    steps: int = _MAX_STEPS

    def rules_of(self, element: html.HtmlElement) -> list[Rule]:
        """Rules that match, in the order of the cascade."""
        found: list[Rule] = list(self.matched.get(element, ()))
        if self.simple:
            names = self._names(element)
            for name in ("*", element.tag, *names):
                found += [
                    r for r in self.simple.get(name, ()) if self._fits(element, names, r.chain)
                ]
        if len(found) > 1:
            found.sort(key=lambda r: (r.specificity, r.order))
        return found

    def _names(self, element: html.HtmlElement) -> frozenset[str]:
        """Classes and id of an element as a selector names them."""
        classes, identifier = key = element.get("class"), element.get("id")
        known = self.names.get(key)
        if known is None:
            names = ["." + c for c in classes.split()] if classes else []
            if identifier:
                names.append("#" + identifier)
            known = self.names[key] = frozenset(names)
        return known

    def _fits(
        self,
        element: html.HtmlElement,
        names: frozenset[str],
        chain: tuple[tuple[str, Compound], ...],
    ) -> bool:
        first = chain[0][1]
        if (first.tag is not None and first.tag != element.tag) or not first.names <= names:
            return False
        return len(chain) == 1 or self._ancestors_fit(element, chain, 1)

    def _ancestors_fit(
        self, element: html.HtmlElement, chain: tuple[tuple[str, Compound], ...], at: int
    ) -> bool:
        """Whether ancestors match chain[at:]. On a page that needs more steps than any page does,
        the last compound alone decides: rather too much is hidden there."""
        combinator, compound = chain[at]
        above = element.getparent()
        while above is not None:
            if self.steps <= 0:
                return True
            self.steps -= 1
            if self._has(above, compound) and (
                at + 1 == len(chain) or self._ancestors_fit(above, chain, at + 1)
            ):
                return True
            if combinator == ">":
                return False
            above = above.getparent()
        return False

    def _has(self, element: html.HtmlElement, compound: Compound) -> bool:
        if compound.tag is not None and compound.tag != element.tag:
            return False
        return not compound.names or compound.names <= self._names(element)


def read_sheets(tree: html.HtmlElement) -> Sheets:
    """All in-page rules that have to do with what is seen."""
    sheets = Sheets()
    rules: list[Rule] = []
    for source, media in _sources(tree, sheets):
        if media_applies(media):
            _read_rules(source[:MAX_SHEET_CHARS], "", rules, sheets, 0)
    complex_rules: list[Rule] = []
    for rule in rules:
        chain = _simple_chain(rule.selector)
        if chain is None:
            complex_rules.append(rule)
            continue
        rule.chain = chain
        last = chain[0][1]
        key = min(last.names) if last.names else last.tag or "*"
        sheets.simple.setdefault(key, []).append(rule)
    for named in sheets.simple.values():
        del named[:-_MAX_RULES_A_NAME]  # the last ones win
    unread: list[Rule] = []
    for rule in complex_rules[:_MAX_COMPLEX]:
        found = _select(tree, rule.selector)
        if found is None:
            unread.append(rule)
        for element in found or ():
            sheets.matched.setdefault(element, []).append(rule)
    if unread:
        _select_by_browser_engine(tree, unread, sheets)
    return sheets


def _select_by_browser_engine(
    tree: html.HtmlElement, rules: Sequence[Rule], sheets: Sheets
) -> None:
    """What cssselect cannot express is matched by Lexbor, on a copy whose elements are numbered."""
    elements = [e for e in tree.iter() if isinstance(e.tag, str)]
    for number, element in enumerate(elements):
        element.set(_NUMBER, str(number))
    copy: Any = HTMLTree.parse(str(html.tostring(tree, encoding="unicode")))
    for element in elements:
        del element.attrib[_NUMBER]
    for rule in rules:
        try:
            nodes = list(copy.document.query_selector_all(rule.selector)[:])
        except ValueError:
            continue  # no selector at all
        for node in nodes:
            number = node.getattr(_NUMBER)
            if number is not None:
                sheets.matched.setdefault(elements[int(number)], []).append(rule)


def _sources(tree: html.HtmlElement, sheets: Sheets) -> Iterator[tuple[str, str]]:
    for element in tree.iter("style", "link"):
        if any(a.tag in ("noscript", "template") for a in element.iterancestors()):
            continue
        media = element.get("media") or ""
        if element.tag == "style":
            if (element.get("type") or "text/css").strip().lower() in ("", "text/css"):
                yield element.text or "", media
        elif "stylesheet" in (element.get("rel") or "").lower().split():
            source = _data_url(element.get("href") or "")
            sheets.linked |= source is None
            if source is not None:
                yield source, media


def _data_url(href: str) -> str | None:
    if not href.strip().lower().startswith("data:"):
        return None
    head, _, data = href.strip()[5:].partition(",")
    raw = unquote_to_bytes(data[:MAX_SHEET_CHARS])
    if head.lower().rstrip().endswith(";base64"):
        try:
            raw = base64.b64decode(raw + b"==")
        except (binascii.Error, ValueError):
            return ""
    return raw.decode("utf-8", "replace")


_PIECE = re.compile(
    r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|/\*.*?(?:\*/|$)|\\.|[{};]|@import\b""", re.S | re.I
)


def _blocks(css: str) -> Iterator[tuple[str, str]]:
    """(prelude, block) of the rules at the top level; statements without a block as (text, "")."""
    depth = start = body = 0
    prelude = ""
    for piece in _PIECE.finditer(css):
        sign = piece.group()
        if sign == "{":
            if depth == 0:
                prelude, body = css[start : piece.start()], piece.end()
            depth += 1
        elif sign == "}":
            if depth == 1:
                yield prelude, css[body : piece.start()]
                start = piece.end()
            elif depth == 0:
                start = piece.end()
            depth = max(depth - 1, 0)
        elif sign == ";" and depth == 0:
            yield css[start : piece.start()], ""
            start = piece.end()
    if depth and prelude:
        yield prelude, css[body:]  # the end of a sheet closes what is open


def _read_rules(css: str, parent: str, rules: list[Rule], sheets: Sheets, depth: int) -> None:
    """Append the rules of a sheet, or of the inside of a conditional or nesting rule."""
    for prelude, block in _blocks(css):
        if len(rules) >= MAX_RULES or depth > _MAX_NESTING:
            return
        head = _uncommented(prelude).strip()
        if head.startswith("@"):
            _read_at_rule(head, block, parent, rules, sheets, depth)
        elif head and block and (_RELEVANT.search(block) or "{" in block):
            selector = _nested(head, parent)
            inner = list(_blocks(block)) if "{" in block else []
            declarations = read_declarations(block)
            if declarations:
                _add(selector, declarations, rules)
            if any(b for _, b in inner):
                _read_rules(_after_declarations(block), selector, rules, sheets, depth + 1)


def _read_at_rule(
    head: str, block: str, parent: str, rules: list[Rule], sheets: Sheets, depth: int
) -> None:
    name, _, condition = head[1:].partition(" ")
    name, _, more = name.lower().partition("(")
    condition = (("(" + more) if more else "") + condition
    if name == "import":
        match = re.search(r"""data:[^"')]+""", head)
        source = _data_url(match.group()) if match else None
        sheets.linked |= source is None
        if source is not None:
            _read_rules(source[:MAX_SHEET_CHARS], parent, rules, sheets, depth + 1)
    elif name.endswith("keyframes"):
        frames = [b for p, b in _blocks(block) if re.search(r"\bto\b|100%", p, re.I)]
        if frames:
            sheets.keyframes[condition.strip().lower()] = read_declarations(frames[-1])
    elif name in ("supports", "layer", "scope", "starting-style", "container", "document"):
        if name not in ("starting-style", "container"):
            _read_rules(block, parent, rules, sheets, depth + 1)
    elif name == "media" and media_applies(condition):
        if parent and (declarations := read_declarations(block)):
            _add(parent, declarations, rules)
        _read_rules(block, parent, rules, sheets, depth + 1)


def _add(selector: str, declarations: tuple[Declaration, ...], rules: list[Rule]) -> None:
    for part in _split_selectors(selector):
        if len(rules) >= MAX_RULES:
            return
        if rules and rules[-1].selector == part and rules[-1].declarations == declarations:
            continue
        specificity = _specificity(part)
        if specificity is not None:
            rules.append(Rule(part, declarations, specificity, len(rules)))


def _nested(head: str, parent: str) -> str:
    if not parent:
        return head
    outer = f":is({parent})" if "," in parent else parent
    parts: list[str] = []
    for part in _split_selectors(head):
        if "&" in part:
            parts.append(part.replace("&", outer))
        else:
            parts.append(f"{outer} {part}")
    return ", ".join(parts)


def _after_declarations(block: str) -> str:
    """The rules nested in a block, without the declarations between them."""
    return "".join(
        f"{prelude.rpartition(';')[2]}{{{body}}}" for prelude, body in _blocks(block) if body
    )


def _uncommented(text: str) -> str:
    if "/*" not in text:
        return text
    return _PIECE.sub(lambda m: " " if m.group().startswith("/*") else m.group(), text)


_PLAIN_DECLARATION = re.compile(r"([a-z-]+)\s*:\s*([^;:{}\"'\\]*)$", re.I)


def read_declarations(block: str) -> tuple[Declaration, ...]:
    """The declarations of a block or a style attribute that have to do with what is seen."""
    if "{" in block or "\\" in block or '"' in block or "'" in block or "/*" in block:
        return _parsed(block[:20_000])
    found: list[Declaration] = []
    for part in block.split(";"):
        match = _PLAIN_DECLARATION.match(part.strip())
        if match is None:
            if ":" in part:
                return _parsed(block[:20_000])
            continue
        name, value = match.group(1).lower(), match.group(2).strip().lower()
        if name in PROPERTIES or name.startswith("--"):
            value, bang, word = value.partition("!")
            found.append(Declaration(name, value.strip(), bool(bang) and "important" in word))
    return tuple(found)


@lru_cache(maxsize=2048)
def _parsed(block: str) -> tuple[Declaration, ...]:
    found: list[Declaration] = []
    for node in tinycss2.parse_blocks_contents(block, skip_comments=True, skip_whitespace=True):
        if node.type != "declaration":
            continue
        name = node.lower_name if not node.name.startswith("--") else node.name
        if name in PROPERTIES or name.startswith("--"):
            value = "".join(_text(t) for t in node.value).strip().lower()
            found.append(Declaration(name, value, bool(node.important)))
    return tuple(found)


def _text(token: Any) -> str:
    """A component value with its escapes resolved."""
    if token.type == "comment":
        return " "
    if token.type == "ident":
        return str(token.value)
    if token.type == "function":
        return f"{token.lower_name}({''.join(_text(t) for t in token.arguments)})"
    if token.type == "() block":
        return f"({''.join(_text(t) for t in token.content)})"
    return str(token.serialize())


def media_applies(query: str) -> bool:
    """Whether a desktop browser applies what stands under a media query."""
    query = _uncommented(query).strip().lower()
    return not query or any(_one_query(part) for part in query.split(","))


def _one_query(query: str) -> bool:
    negated = query.strip().startswith("not ")
    rest = re.sub(r"^\s*(?:not|only)\s+", "", query)
    medium = re.match(r"\s*([a-z]+)\b(?!\()", rest)
    holds = medium is None or medium.group(1) in ("all", "screen", "and")
    for feature in re.findall(r"\(([^()]*)\)", rest):
        inner_not = f"not ({feature})" in rest
        holds = holds and _feature(feature) != inner_not
    return holds != negated


_MEDIA_LENGTH = re.compile(r"(-?\d*\.?\d+)\s*(px|r?em|in|cm|pt)?")
_FEATURES = {
    "prefers-color-scheme": "light", "prefers-reduced-motion": "no-preference", "hover": "hover",
    "pointer": "fine", "any-hover": "hover", "any-pointer": "fine", "orientation": "landscape",
    "scripting": "enabled", "prefers-contrast": "no-preference", "forced-colors": "none",
    "display-mode": "browser", "update": "fast", "prefers-reduced-data": "no-preference",
}  # fmt: skip


def _feature(text: str) -> bool:
    name, _, value = (part.strip() for part in text.partition(":"))
    if name in _FEATURES:
        return not value or value == _FEATURES[name]
    side = 0 if "width" in name else 1 if "height" in name else None
    length = _MEDIA_LENGTH.search(value or name)
    if side is None or length is None:
        return name in ("color", "grid") and (name == "color") and not value
    unit = length.group(2) or "px"
    px = float(length.group(1)) * (16.0 if unit.endswith("em") else _LENGTH_UNITS[unit])
    size = WINDOW_PX[side]
    if name.startswith("min-"):
        return size >= px
    if name.startswith("max-"):
        return size <= px
    if "<" in name or ">" in name:  # (width >= 600px), (600px <= width)
        first = name.strip()[0].isdigit()
        less = ("<" in name) != first
        return size <= px if less else size >= px
    return size == px


def _split_selectors(selector: str) -> list[str]:
    """The selectors of a list; commas within brackets part nothing."""
    parts: list[str] = []
    depth = start = 0
    for at, sign in enumerate(selector):
        if sign in "([":
            depth += 1
        elif sign in ")]":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(selector[start:at].strip())
            start = at + 1
    parts.append(selector[start:].strip())
    return [p for p in parts if p][:64]


_COMPOUND = re.compile(r"(\*|[a-z][a-z0-9-]*)?((?:[.#][a-z_-][\w-]{0,100})*)", re.I)
_UNSEEN = re.compile(
    r"::|:(?:before|after|first-line|first-letter|hover|focus|active|visited|target|focus-within"
    r"|focus-visible|link|any-link|host|selection|placeholder|fullscreen|popover-open|modal|open)\b"
)
_ROOT = re.compile(r":root\b")


@lru_cache(maxsize=8192)
def _simple_chain(selector: str) -> tuple[tuple[str, Compound], ...] | None:
    """(how the compound is reached from its right neighbour, compound), last one first."""
    chain: list[tuple[str, Compound]] = []
    combinator = " "
    for part in reversed(re.sub(r"\s*>\s*", " > ", selector).split()):
        if part == ">":
            combinator = ">"
            continue
        match = _COMPOUND.fullmatch(part)
        if match is None or not part:
            return None
        tag = (match.group(1) or "*").lower()
        names = frozenset(re.findall(r"[.#][^.#]+", match.group(2)))
        chain.append((combinator, Compound(None if tag == "*" else tag, names)))
        combinator = " "
    return tuple(chain) or None


@lru_cache(maxsize=8192)
def _specificity(selector: str) -> tuple[int, int, int] | None:
    """None for a selector that matches no element as it lies there, or none we can read."""
    if _UNSEEN.search(selector):
        return None
    chain = _simple_chain(selector)
    if chain is not None:
        ids = sum(n.startswith("#") for _, c in chain for n in c.names)
        classes = sum(n.startswith(".") for _, c in chain for n in c.names)
        return ids, classes, sum(c.tag is not None for _, c in chain)
    try:
        [parsed] = parse_selector(_for_cssselect(selector))
    except (SelectorError, ValueError, RecursionError):
        # Lexbor may know it; roughly counted, which only matters where rules contradict.
        return selector.count("#"), len(re.findall(r"[.:\[]", selector)), 1
    return parsed.specificity()


def _for_cssselect(selector: str) -> str:
    # A case flag of an attribute is dropped: the value is compared as it is written.
    return re.sub(r"\s+[iIsS]\s*\]", "]", _ROOT.sub("html", selector))


def _select(tree: html.HtmlElement, selector: str) -> Sequence[html.HtmlElement] | None:
    """The elements that match; None where cssselect does not know what to do."""
    try:
        return _compiled(_for_cssselect(selector))(tree)
    except (SelectorError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=512)
def _compiled(selector: str) -> CSSSelector:
    return CSSSelector(selector, translator="html")
