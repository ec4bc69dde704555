"""A calibrated relevance: the chance that a judge would call the result relevant.

relevance = sigmoid(bias + weights · x), weights in `calibration.json`, fitted by
`benches/fit_relevance.py` on judged pairs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from deepinfer_search_fetch.analyzers import ANALYZER_VERSION, WantedTerms, term_places
from deepinfer_search_fetch.index.document import IndexedPage

BODY_CHARS = 8000
WINDOW_CAP = 50
FEATURES = ("share_of_best", "coverage", "title_coverage", "density", "strength")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


@dataclass(frozen=True, slots=True)
class Calibration:
    bias: float
    weights: tuple[float, ...]

    def relevance(self, row: Sequence[float]) -> float:
        """Probability 0..1 for one feature row (see `features`)."""
        z = self.bias + sum(w * x for w, x in zip(self.weights, row, strict=True))
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, z))))


@lru_cache(maxsize=1)
def load_calibration() -> Calibration:
    """The weights that ship with the package."""
    raw = (files("deepinfer_search_fetch.search") / "calibration.json").read_text("utf-8")
    data = json.loads(raw)
    if data["analyzer"] != ANALYZER_VERSION or tuple(data["features"]) != FEATURES:
        raise RuntimeError("calibration.json was fitted for another analyzer; run fit_relevance.py")
    return Calibration(float(data["bias"]), tuple(float(w) for w in data["weights"]))


def wanted_terms(query_terms: Sequence[str] | WantedTerms, idf: Mapping[str, float]) -> WantedTerms:
    """The terms of a query that say something; made once for all pages of one answer."""
    if isinstance(query_terms, WantedTerms):
        return query_terms
    return WantedTerms(t for t in query_terms if idf.get(t, 0.0) > 0)


def features(
    page: IndexedPage,
    score: float,
    best_score: float,
    query_terms: Sequence[str] | WantedTerms,
    idf: Mapping[str, float],
) -> tuple[float, ...]:
    """(score / best score of this query, idf share of the query found in the page, the same within
    title, headings and anchors, matched terms per word of the tightest window, log of the matched
    idf)."""
    text = page.content[:BODY_CHARS]
    headings = " ".join(_HEADING.findall(text)) if "#" in text else ""
    wanted = wanted_terms(query_terms, idf)
    top = {t for _, t in term_places(f"{page.title} {headings} {page.anchors}", wanted)}
    everything = sum(idf[t] for t in wanted) or 1.0
    places = term_places(text, wanted)
    matched = {t for _, t in places} | (wanted & top)
    mass = sum(sorted(idf[t] for t in matched))
    return (
        score / best_score if best_score > 0 else 0.0,
        mass / everything,
        sum(sorted(idf[t] for t in wanted & top)) / everything,
        _density(places),
        math.log1p(mass),
    )


def _density(places: Sequence[tuple[int, str]]) -> float:
    """Distinct matched terms per word of the shortest span with all of them (at most 50).

    places: position and term of every match, in order.
    """
    distinct = {t for _, t in places}
    if len(distinct) <= 1:
        return float(len(distinct))
    counts: dict[str, int] = {}
    shortest = WINDOW_CAP
    left = 0
    for position, term in places:
        counts[term] = counts.get(term, 0) + 1
        while len(counts) == len(distinct):
            start, first = places[left]
            shortest = min(shortest, position - start + 1)
            counts[first] -= 1
            if not counts[first]:
                del counts[first]
            left += 1
    return min(1.0, len(distinct) / max(shortest, len(distinct)))
