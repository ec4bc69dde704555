"""What two extraction libraries would keep, mapped back to our runs.

The libraries' own output is never returned: it only votes, run by run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, Literal

from lxml import html
from resiliparse.extract.html2text import extract_plain_text

from deepinfer_search_fetch.extract.tree import Run, words

_SHINGLE = 4
_SLACK = 40  # characters of the candidate that a short run may skip
_MAX_PLACES = 4
_MAX_TRIES = 200_000  # places compared per candidate; a page of boilerplate is cut short
# The library logs every page it gives up on; giving up is an answer here.
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)


Focus = Literal["balanced", "recall", "precision"]


def voters(document: html.HtmlElement, page: str, *, quick: bool = False) -> list[str]:
    """The texts that vote, in the order the model knows; document: uncleaned; page: its source.

    quick: resiliparse alone, which takes a twentieth of the time.
    """
    if quick:
        return [resiliparse_text(page)]
    return [
        trafilatura_text(document, "recall"),
        trafilatura_text(document, "precision"),
        resiliparse_text(page),
    ]


def trafilatura_text(document: html.HtmlElement, focus: Focus = "balanced") -> str:
    """Plain text of trafilatura's choice without comments, "" where it finds nothing."""
    from trafilatura import bare_extraction

    try:
        result: Any = bare_extraction(
            deepcopy(document),
            favor_recall=focus == "recall",
            favor_precision=focus == "precision",
            include_comments=False,
            with_metadata=False,
        )
    except Exception:
        # A third-party parser meeting a page it cannot digest costs its vote, not the request.
        return ""
    if result is None:
        return ""
    return result.text or ""


def resiliparse_text(page: str) -> str:
    """Plain text of resiliparse's main-content mode (comments kept)."""
    return extract_plain_text(
        page,
        main_content=True,
        preserve_formatting=False,
        alt_texts=False,
        list_bullets=False,
        comments=True,
    )


def votes(run_words: Sequence[list[str]], candidate: str) -> list[float]:
    """For each run, the share (0..1) of it that `candidate` holds at the place where it should.

    run_words: `tree.words` of every run. Both texts are in the page's order, so the longest
    increasing chain of whole runs anchors one in the other; what is short or only partly there
    counts between its anchors alone. A menu entry does not profit from the same word in the
    article, nor a teaser's title from the article's own.
    """
    candidate_words = words(candidate)
    text = " " + " ".join(candidate_words) + " "
    needles = [" " + " ".join(w) + " " if w else "" for w in run_words]
    out = [0.0] * len(needles)
    anchors = _heaviest_chain(_places(run_words, needles, candidate_words, text))
    for i, _ in anchors:
        out[i] = 1.0
    for (i, place), (j, following) in pairwise([(-1, 0), *anchors, (len(needles), len(text))]):
        start = place + len(needles[i]) - 1 if i >= 0 else 0
        if j > i + 1:
            _fill_between(out, range(i + 1, j), run_words, needles, text[start : following + 1])
    return out


def _fill_between(
    out: list[float],
    gap: range,
    run_words: Sequence[list[str]],
    needles: Sequence[str],
    segment: str,
) -> None:
    """Votes of the runs between two anchors, from the part of the candidate between them."""
    words_here = segment.split()
    if not words_here:
        return
    grams = _grams(words_here)
    cursor = 0
    for k in gap:
        needle = needles[k]
        if needle and len(run_words[k]) < _SHINGLE:
            found = segment.find(needle, cursor, cursor + len(needle) + _SLACK)
            if found >= 0:
                cursor = found + len(needle) - 1
                out[k] = 1.0
        elif needle and grams:
            own = _grams(run_words[k])
            out[k] = len(own & grams) / len(own)


def _grams(words_here: list[str]) -> set[tuple[str, ...]]:
    return set(zip(*(words_here[n:] for n in range(_SHINGLE)), strict=False))


def _places(
    run_words: Sequence[list[str]], needles: Sequence[str], words_there: list[str], text: str
) -> list[tuple[int, int, int]]:
    """(run, offset in text, weight) of the first places of every long run that `text` has whole.

    One pass over `text` notes where the beginnings and ends of the runs stand: searching it for
    one run after the other would take the square of the page's size.
    """
    long = [i for i, w in enumerate(run_words) if len(w) >= _SHINGLE]
    noted: dict[tuple[str, ...], list[int]] = {}
    for i in long:
        noted[tuple(run_words[i][:_SHINGLE])] = []
        noted[tuple(run_words[i][-_SHINGLE:])] = []
    offset = 0
    for gram in zip(*(words_there[n:] for n in range(_SHINGLE)), strict=False):
        if (offsets := noted.get(gram)) is not None:
            offsets.append(offset)
        offset += len(gram[0]) + 1
    found: list[tuple[int, int, int]] = []
    tries = _MAX_TRIES
    for i in long:
        needle, own = needles[i], run_words[i]
        at, back = noted[tuple(own[:_SHINGLE])], 0
        ends = noted[tuple(own[-_SHINGLE:])]
        if len(ends) < len(at):
            at, back = ends, len(needle) - len(" ".join(own[-_SHINGLE:])) - 2
        places = 0
        for offset in at:
            tries -= 1
            if places == _MAX_PLACES or tries < 0:
                break
            if offset >= back and text.startswith(needle, offset - back):
                found.append((i, offset - back, len(needle)))
                places += 1
    return found


def _heaviest_chain(items: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(run, offset) of the heaviest of `items` that stand in the same order in both texts."""
    if not items:
        return []
    ranks = {place: r for r, place in enumerate(sorted({place for _, place, _ in items}), 1)}
    best = _PrefixMax(len(ranks))
    weights: list[int] = []
    before: list[int] = []
    pending: list[int] = []
    for n, (run, place, weight) in enumerate(items):
        # Two places of one run must not follow each other: they enter the tree together.
        if pending and items[pending[-1]][0] != run:
            for m in pending:
                best.put(ranks[items[m][1]], weights[m], m)
            pending = []
        above, link = best.get(ranks[place] - 1)
        weights.append(above + weight)
        before.append(link)
        pending.append(n)
    top = max(weights)
    n = max(i for i, w in enumerate(weights) if w == top)
    chain: list[tuple[int, int]] = []
    while n >= 0:
        chain.append(items[n][:2])
        n = before[n]
    return chain[::-1]


class _PrefixMax:
    """Largest (weight, item) among ranks 1..r; of equal weights the latest put."""

    def __init__(self, size: int) -> None:
        self._tree: list[tuple[int, int]] = [(0, -1)] * (size + 1)

    def put(self, rank: int, weight: int, item: int) -> None:
        entry = (weight, item)
        while rank < len(self._tree):
            self._tree[rank] = max(self._tree[rank], entry)
            rank += rank & -rank

    def get(self, rank: int) -> tuple[int, int]:
        found = (0, -1)
        while rank > 0:
            found = max(found, self._tree[rank])
            rank -= rank & -rank
        return found


def runs_words(runs: Sequence[Run]) -> list[list[str]]:
    return [words(run.text) for run in runs]
