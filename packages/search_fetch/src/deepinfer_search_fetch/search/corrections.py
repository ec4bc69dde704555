"""A suggestion when the index holds no page with one of the query's words."""

from __future__ import annotations

import re

from deepinfer_search_fetch.index.analyzers import is_cjk, terms
from deepinfer_search_fetch.index.tantivy_backend import FieldTerm, Retrieval, SearchBackend

MIN_WORD_CHARS = 4
_TWO_EDITS_FROM = 8
_PAGES_READ = 10
_CHARACTERS_READ = 20_000
_WORD = re.compile(r"[^\W\d_]{4,40}")


def correction(backend: SearchBackend, query: str) -> str | None:
    """`query` with unknown words replaced by the closest common ones; None if nothing is better.

    Operators and quoted phrases stay as they are.
    """
    changed = False
    pieces = re.split(r'(\s+|"[^"]*")', query)
    for i, piece in enumerate(pieces):
        if not _WORD.fullmatch(piece) or is_cjk(piece):
            continue
        known = terms(piece)
        if len(known) != 1 or backend.doc_freq("body", known[0]):
            continue
        better = _closest(backend, piece.casefold(), known[0])
        if better is not None:
            pieces[i] = better
            changed = True
    return "".join(pieces) if changed else None


def _closest(backend: SearchBackend, word: str, term: str) -> str | None:
    allowed = 2 if len(word) >= _TWO_EDITS_FROM else 1
    group = (FieldTerm("body", term, 1.0, edits=allowed),)
    best: tuple[int, int, str] | None = None
    for hit in backend.retrieve(Retrieval((group,)), _PAGES_READ):
        text = f"{hit.page.title} {hit.page.content[:_CHARACTERS_READ]}".casefold()
        for candidate in set(_WORD.findall(text)):
            if abs(len(candidate) - len(word)) > allowed:
                continue
            distance = edit_distance(word, candidate)
            if not 0 < distance <= allowed:
                continue
            commonness = max(backend.doc_freq("body", t) for t in terms(candidate))
            best = min(filter(None, (best, (distance, -commonness, candidate))))
    return best[2] if best else None


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]
