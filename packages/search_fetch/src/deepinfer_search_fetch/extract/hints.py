"""What the boxes around a run say about it: semantic elements, and words of class, id and role."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from deepinfer_search_fetch.extract.layout import Floats, Layout

_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.I))
    for name, pattern in (
        ("content", r"content|article|entry|story|main|body|text|prose|markdown|post(?!er|age)"),
        ("nav", r"nav|menu|breadcrumb|toc\b|pagination|pager|skip|tabs?\b"),
        ("frame", r"footer|header|masthead|topbar|copyright|colophon|sitenotice"),
        ("side", r"side|aside|widget|rail|related|recommend|popular|trending|more-|also|latest"),
        (
            "promo",
            r"promo|banner|\bad[sv]?\b|ad-|-ad\b|sponsor|cta|newsletter|subscri|signup|offer",
        ),
        ("consent", r"cookie|consent|gdpr|modal|popup|overlay|dialog|toast|login|signin"),
        ("social", r"share|social|follow|facebook|twitter|like|vote|rating"),
        ("meta", r"meta|byline|author|date|time|tag|categor|label|info|credit|caption"),
        ("comment", r"comment|reply|replies|disqus|respond|discuss"),
        ("forum", r"thread|topic|message|posts?\b|answer|question|quote|signature"),
        ("product", r"product|price|spec|sku|cart|buy|variant|review|description|feature"),
        ("listing", r"card|grid|item|list|result|tile|teaser|archive|feed|gallery|carousel|slide"),
        ("section", r"section|hero|container|wrapper|block|row|col|panel|faq|accordion"),
        ("code", r"code|highlight|syntax|source|example|snippet|api|docs?\b|method"),
    )
)
HINT_INDEX = {name: i for i, (name, _) in enumerate(_HINTS)}
_SEMANTIC_NAMES = """
article main nav header footer aside form section table figure blockquote dl
"""
SEMANTIC = {name: i for i, name in enumerate(_SEMANTIC_NAMES.split())}
_LIST = frozenset({"ul", "ol", "dl", "menu"})
_FADE = 0.6  # how much of a hint is left one box further down
_MAX_HINT_CHARS = 300


def context_columns(layout: Layout) -> Floats:
    """float64 [boxes, 2 + semantic + 2 · hints]: in a list, in a link, inside which semantic
    elements, and every hint by nearness (1 here, fading downwards) and at all."""
    k, s = len(_HINTS), len(SEMANTIC)
    out = np.zeros((len(layout.boxes), 2 + s + 2 * k))
    parents = layout.parent.tolist()
    for b, box in enumerate(layout.boxes):
        parent = parents[b]
        if parent < 0:
            continue  # the body's classes describe the page, not a place in it
        row = out[b]
        row[:] = out[parent]
        row[2 + s : 2 + s + k] *= _FADE
        attributes = box.element.attrib
        if attributes:
            names = [v for n in ("class", "id", "role") if (v := attributes.get(n))]
            for h in _found(" ".join(names)[:_MAX_HINT_CHARS]):
                row[2 + s + h] = row[2 + s + k + h] = 1.0
        if box.tag in _LIST:
            row[0] = 1.0
        elif box.tag == "a":
            row[1] = 1.0
        at = SEMANTIC.get(box.tag)
        if at is not None:
            row[2 + at] = 1.0
    return out


def far_hint(contexts: Floats, name: str) -> Floats:
    """The column of `contexts` that says whether hint `name` holds anywhere above."""
    return contexts[:, 2 + len(SEMANTIC) + len(_HINTS) + HINT_INDEX[name]]


@lru_cache(maxsize=16384)
def _found(text: str) -> tuple[int, ...]:
    return tuple(i for i, (_, p) in enumerate(_HINTS) if p.search(text)) if text else ()
