"""Links of a page for the crawler and the link graph: every <a href>, with its rel and its text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lxml import html as lxml_html

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import SearchFetchError

MAX_LINKS = 2000
MAX_ANCHOR_CHARS = 120
_TEMPLATE_TAGS = 300
_UNTRUSTED = frozenset({"nofollow", "ugc", "sponsored"})


@dataclass(frozen=True, slots=True)
class PageLink:
    """url: absolute, canonical. text: of the anchor, blanks folded. trusted: no nofollow, ugc or
    sponsored, neither on the link nor for the whole page."""

    url: str
    text: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class PageLinks:
    """links: in document order, each target once. template: hash of the page's frame of elements,
    equal for sites made from one template."""

    links: tuple[PageLink, ...] = ()
    template: str = ""


def page_links(text: str, base: urls.Url, *, nofollow: bool = False) -> PageLinks:
    """The links of HTML `text` that came from `base`; what is not a http(s) URL is left out."""
    try:
        root: Any = lxml_html.document_fromstring(
            text.encode("utf-8", "replace"), parser=lxml_html.HTMLParser(encoding="utf-8")
        )
    except (lxml_html.etree.ParserError, ValueError):
        return PageLinks()
    for element in root.iter("base"):
        base = _joined(base, element.get("href") or "") or base
        break
    nofollow = nofollow or any("nofollow" in content for content in _robots(root))
    found: dict[str, PageLink] = {}
    for anchor in root.iter("a"):
        target = _joined(base, anchor.get("href") or "")
        if target is None or len(found) >= MAX_LINKS:
            continue
        url = urls.canonical(target)
        rel = set((anchor.get("rel") or "").lower().split())
        if url not in found:
            label = " ".join("".join(anchor.itertext()).split())[:MAX_ANCHOR_CHARS]
            found[url] = PageLink(url, label, not nofollow and not rel & _UNTRUSTED)
    return PageLinks(tuple(found.values()), _template(root))


def _joined(base: urls.Url, reference: str) -> urls.Url | None:
    if not reference.strip() or reference.lstrip().startswith("#"):
        return None
    try:
        return urls.join(base, reference)
    except SearchFetchError:
        return None


def _robots(root: Any) -> Iterator[str]:
    for meta in root.iter("meta"):
        if (meta.get("name") or "").lower() in ("robots", "deepinferfetch"):
            yield (meta.get("content") or "").lower()


def _template(root: Any) -> str:
    """Tags and classes of the first elements, in order; text and links do not count."""
    frame: list[str] = []
    for element in root.iter():
        if isinstance(element.tag, str):
            frame.append(f"{element.tag}.{element.get('class') or ''}")
            if len(frame) == _TEMPLATE_TAGS:
                break
    return hashlib.sha256("\n".join(frame).encode("utf-8", "replace")).hexdigest()[:16]
