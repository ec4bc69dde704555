"""A suggestion when the index holds no page with one of the query's words."""

from __future__ import annotations

import re
from string import ascii_lowercase

from deepinfer_search_fetch.analyzers import is_cjk, terms
from deepinfer_search_fetch.index.backend import FieldTerm, Retrieval, SearchSnapshot

_TWO_EDITS_FROM = 8
_PAGES_READ = 10
_CHARACTERS_READ = 20_000
_WORD = re.compile(r"[^\W\d_]{4,40}")


def correction(backend: SearchSnapshot, query: str) -> str | None:
    """`query` with unknown words replaced by the closest common ones; None if nothing is better.

    Operators and quoted phrases stay as they are.
    """
    changed = False
    pieces = re.split(r'(\s+|"[^"]*")', query)
    for i, piece in enumerate(pieces):
        if not _WORD.fullmatch(piece) or is_cjk(piece):
            continue
        known = terms(piece)
        if len(known) != 1 or backend.doc_freqs("body", known)[0]:
            continue
        better = _closest(backend, piece.casefold(), known[0])
        if better is not None:
            pieces[i] = better
            changed = True
    return "".join(pieces) if changed else None


def _closest(backend: SearchSnapshot, word: str, term: str) -> str | None:
    return _one_edit_away(backend, word) or _two_edits_away(backend, word, term)


def _one_edit_away(backend: SearchSnapshot, word: str) -> str | None:
    """The commonest spelling that one slip of the keyboard turns into `word`.

    Spellings are made first and stemmed then: a slip in an ending leaves another stem.
    """
    spellings = [s for s in _slips(word) if len(terms(s)) == 1]
    counts = backend.doc_freqs("body", [terms(s)[0] for s in spellings])
    best = max(zip(counts, spellings, strict=True), key=lambda item: item[0], default=(0, ""))
    return best[1] if best[0] else None


def _slips(word: str) -> list[str]:
    """Neighbours swapped, a letter too many, another letter, a letter missing; likeliest first."""
    cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    shorter = [a + b[1:] for a, b in cuts if b]
    other = [a + c + b[1:] for a, b in cuts if b for c in ascii_lowercase]
    longer = [a + c + b for a, b in cuts for c in ascii_lowercase]
    return [s for s in dict.fromkeys([*_swaps(word), *shorter, *other, *longer]) if s != word]


def _swaps(word: str) -> list[str]:
    return [word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)]


def _two_edits_away(backend: SearchSnapshot, word: str, term: str) -> str | None:
    """The closest word of pages that hold a term at most two slips from the word's.

    A swap in the ending hides the stem, so that the stems of all swaps are looked for too.
    """
    if len(word) < _TWO_EDITS_FROM:
        return None
    stems = {t for s in _swaps(word) for t in terms(s)} - {term}
    near = [FieldTerm("body", stem, 1.0, edits=1) for stem in sorted(stems)]
    group = (FieldTerm("body", term, 1.0, edits=2), *near)
    best: tuple[int, int, str] | None = None
    for hit in backend.retrieve(Retrieval((group,)), _PAGES_READ):
        text = f"{hit.page.title} {hit.page.content[:_CHARACTERS_READ]}".casefold()
        for candidate in set(_WORD.findall(text)):
            if abs(len(candidate) - len(word)) > 2:
                continue
            distance = edit_distance(word, candidate)
            if 0 < distance <= 2:
                commonness = max(backend.doc_freqs("body", terms(candidate)))
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
