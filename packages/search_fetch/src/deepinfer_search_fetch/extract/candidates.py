"""What two extraction libraries would keep, mapped back to our runs.

The libraries' own output is never returned: it only votes, run by run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from lxml import html
from resiliparse.extract.html2text import extract_plain_text

from deepinfer_search_fetch.extract.tree import Run, words

_SHINGLE = 4
# The library logs every page it gives up on; giving up is an answer here.
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)


def trafilatura_text(document: html.HtmlElement, *, fast: bool) -> str:
    """Plain text of trafilatura's choice without comments, "" where it finds nothing."""
    from trafilatura import bare_extraction

    try:
        result: Any = bare_extraction(
            deepcopy(document), fast=fast, include_comments=False, with_metadata=False
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
    """For each run, the share (0..1) of it that occurs in `candidate`, followed in order.

    run_words: `tree.words` of every run. A short run counts only where the order leads to it, so
    that a menu entry does not profit from the same word in the article.
    """
    candidate_words = words(candidate)
    text = " " + " ".join(candidate_words) + " "
    shingles = {
        tuple(candidate_words[i : i + _SHINGLE])
        for i in range(max(0, len(candidate_words) - _SHINGLE + 1))
    }
    cursor = 0
    out: list[float] = []
    for words_here in run_words:
        if not words_here:
            out.append(0.0)
            continue
        needle = " " + " ".join(words_here) + " "
        short = len(words_here) < _SHINGLE
        found = text.find(needle, cursor, cursor + len(needle) + 40 if short else len(text))
        if found >= 0:
            cursor = found + len(needle) - 1
            out.append(1.0)
        elif short:
            out.append(0.0)
        elif needle in text:
            out.append(1.0)
        else:
            grams = [
                tuple(words_here[i : i + _SHINGLE]) for i in range(len(words_here) - _SHINGLE + 1)
            ]
            out.append(sum(g in shingles for g in grams) / len(grams))
    return out


def runs_words(runs: Sequence[Run]) -> list[list[str]]:
    return [words(run.text) for run in runs]
