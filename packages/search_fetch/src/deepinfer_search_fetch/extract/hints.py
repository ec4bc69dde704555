"""What the boxes around a run say about it: semantic elements, and words of class, id and role."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deepinfer_search_fetch.extract.layout import Floats, Layout
from deepinfer_search_fetch.extract.tree import Box, Run
from deepinfer_search_fetch.extract.wording import folded

_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
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
_READERS = re.compile(r"\bcomments?\b|comment-|disqus|\brepl(?:y|ies)\b", re.I)
_FADE = 0.6  # how much of a hint is left one box further down
_MAX_HINT_CHARS = 300


def context_columns(layout: Layout) -> Floats:
    """float64 [boxes, 2 + semantic + 2 · hints]: in a list, in a link, inside which semantic
    elements, and every hint by nearness (1 here, fading downwards) and at all."""
    near, far = 2 + len(SEMANTIC), 2 + len(SEMANTIC) + len(_HINTS)
    own = np.zeros((len(layout.boxes), far + len(_HINTS)), dtype=np.bool_)
    rows: list[int] = []
    columns: list[int] = []
    for b, box in enumerate(layout.boxes):
        if box.parent is None:
            continue  # the body's classes describe the page, not a place in it
        found = _columns(box)
        columns += found
        rows += [b] * len(found)
    own[rows, columns] = True
    out = own.astype(np.float64)
    # A level at a time, since a parent's row must be done before its children's.
    for level in range(1, int(layout.depth.max()) + 1):
        here = np.flatnonzero(layout.depth == level)
        inherited = out[layout.parent[here]]
        inherited[:, near:far] *= _FADE
        out[here] = np.where(own[here], 1.0, inherited)
    return out


def _columns(box: Box) -> list[int]:
    """The columns that one box sets by itself."""
    s, k = 2 + len(SEMANTIC), len(_HINTS)
    columns: list[int] = []
    get = box.element.get
    names = [v for n in ("class", "id", "role") if (v := get(n))]
    for h in _found_in(" ".join(names)[:_MAX_HINT_CHARS]):
        columns += (s + h, s + k + h)
    if box.tag in _LIST:
        columns.append(0)
    elif box.tag == "a":
        columns.append(1)
    if (at := SEMANTIC.get(box.tag)) is not None:
        columns.append(2 + at)
    return columns


def in_comments(runs: Sequence[Run]) -> NDArray[np.bool_]:
    """Which runs lie in a box whose class or id says that it holds readers' comments."""
    known: dict[Box, bool] = {}

    def said(box: Box | None) -> bool:
        path: list[Box] = []
        while box is not None and box.tag != "body" and box not in known:
            path.append(box)
            box = box.parent
        state = known.get(box, False) if box is not None else False
        for inner in reversed(path):
            names = f"{inner.element.get('class') or ''} {inner.element.get('id') or ''}"
            state = known[inner] = state or _names_readers(names)
        return state

    return np.array([said(run.box) for run in runs], dtype=np.bool_)


@lru_cache(maxsize=16384)
def _names_readers(names: str) -> bool:
    return _READERS.search(names) is not None


def far_hint(contexts: Floats, name: str) -> Floats:
    """The column of `contexts` that says whether hint `name` holds anywhere above."""
    return contexts[:, 2 + len(SEMANTIC) + len(_HINTS) + HINT_INDEX[name]]


def _found_in(text: str) -> set[int]:
    # No hint goes across a blank, and pages share their names more than their lists of names.
    return set().union(*map(_found, text.split(" "))) if text else set()


@lru_cache(maxsize=16384)
def _found(name: str) -> tuple[int, ...]:
    low = folded(name)
    return tuple(i for i, (_, p) in enumerate(_HINTS) if p.search(low))
