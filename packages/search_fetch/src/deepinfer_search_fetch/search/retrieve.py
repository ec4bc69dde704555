"""From a parsed query to candidates: fields, boosts, and expansion by feedback (RM3)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from deepinfer_search_fetch.analyzers import (
    STOP_WORDS,
    content_terms,
    is_cjk,
    is_function_term,
    is_unigram,
)
from deepinfer_search_fetch.index.backend import FieldTerm, Hit, Retrieval, SearchSnapshot
from deepinfer_search_fetch.search.query import ParsedQuery

# Summed per term (tie 1.0): the body field repeats the title, so a title word counts 1 + 0.5.
FIELD_BOOSTS: Final = (
    ("body", 1.0),
    ("title", 0.5),
    ("headings", 0.2),
    ("anchors", 0.4),
    ("url_terms", 0.3),
)
CJK_TITLE_BOOST = 1.0
UNIGRAM_WEIGHT = 0.5
FUNCTION_WEIGHT = 0.1
CANDIDATES = 200
FEEDBACK_DOCUMENTS = 10
FEEDBACK_TERMS = 30
ORIGINAL_WEIGHT = 0.4
LIKELIHOOD_POWER = 4
# From so many words on, a page may be found by the feedback terms alone.
WIDEN_FROM_TERMS = 4
PRIOR_DOCUMENTS = 1000
_FEEDBACK_CHARS = 8000


@dataclass(frozen=True, slots=True)
class Filters:
    """Request-level restrictions, added to those of the query text."""

    sites: tuple[str, ...] = ()
    blocked_sites: tuple[str, ...] = ()
    language: str | None = None
    day_range: tuple[int | None, int | None] | None = None


def inverse_frequencies(backend: SearchSnapshot, terms: Sequence[str]) -> dict[str, float]:
    """idf(t) = ln(1 + (N - n + 0.5) / (n + 0.5)) over the body field; CJK single characters and
    function words weigh less.

    N counts PRIOR_DOCUMENTS more than there are: in an index of ten pages a word that all of them
    hold is still a rare word of the language.
    """
    total = backend.size() + PRIOR_DOCUMENTS
    out: dict[str, float] = {}
    for term, count in zip(terms, backend.doc_freqs("body", terms), strict=True):
        n = min(count, total)
        idf = math.log(1 + (total - n + 0.5) / (n + 0.5))
        out[term] = idf * _term_weight(term)
    return out


def retrieve(
    backend: SearchSnapshot,
    parsed: ParsedQuery,
    filters: Filters,
    *,
    expand: bool | None,
    k: int = CANDIDATES,
) -> list[Hit]:
    """Up to `k` hits, best first. The first hits do not depend on `k`, but where scores are equal
    up to rounding.

    expand: None decides by the query (any without CJK). Pages found for a query of fewer than
    WIDEN_FROM_TERMS words hold one of them: there expansion only orders.
    """
    if not _asks(parsed, filters):
        return []
    weights = dict.fromkeys(parsed.terms, 1.0)
    plain = _request(parsed, weights, filters)
    if expand is False or not parsed.terms or any(is_unigram(t) for t in parsed.terms):
        return backend.retrieve(plain, k)
    feedback = backend.retrieve(plain, FEEDBACK_DOCUMENTS)
    if not feedback:
        return []
    short = len(parsed.terms) < WIDEN_FROM_TERMS
    if short and len(feedback) < FEEDBACK_DOCUMENTS:
        return feedback[:k]  # so few pages need no better order, and tell of no topic
    expanded = _feedback(parsed.terms, feedback)
    request = _request(parsed, expanded, filters)
    if short:
        asked = tuple(range(len(parsed.terms)))  # the query's terms are the first groups
        request = replace(request, alternatives=(*request.alternatives, asked))
    return backend.retrieve(request, k)


def _asks(parsed: ParsedQuery, filters: Filters) -> bool:
    """False for a query of signs alone: it names no page, and must not list (and charge) them all.

    An operator or a list of sites without words does: it asks for all that it lets through.
    """
    wanted = (parsed.terms, parsed.phrases, parsed.excluded, parsed.sites, parsed.blocked_sites)
    limits = (parsed.language, parsed.after, parsed.before, filters.day_range)
    return any(wanted) or bool(filters.sites) or any(limit is not None for limit in limits)


def _request(parsed: ParsedQuery, weights: dict[str, float], filters: Filters) -> Retrieval:
    asked = frozenset(parsed.terms)
    groups = tuple(_group(t, weight, asked=t in asked) for t, weight in weights.items())
    low, high = filters.day_range or (None, None)
    low = max((d for d in (low, parsed.after) if d is not None), default=None)
    high = min((d for d in (high, parsed.before) if d is not None), default=None)
    return Retrieval(
        groups,
        tie=1.0,
        phrases=tuple(parsed.phrases),
        excluded=tuple(parsed.excluded),
        sites=(*parsed.sites, *filters.sites),
        blocked_sites=(*parsed.blocked_sites, *filters.blocked_sites),
        language=parsed.language or filters.language,
        day_range=None if low is None and high is None else (low, high),
        alternatives=tuple(parsed.alternatives),
    )


def _term_weight(term: str) -> float:
    if is_function_term(term):
        return FUNCTION_WEIGHT
    return UNIGRAM_WEIGHT if is_unigram(term) else 1.0


def _group(term: str, weight: float, *, asked: bool) -> tuple[FieldTerm, ...]:
    """asked: a term of the query itself; one of feedback is looked for in body and title alone."""
    weight *= _term_weight(term)
    boosts = dict(FIELD_BOOSTS if asked else FIELD_BOOSTS[:2])
    if is_cjk(term):
        boosts["title"] = CJK_TITLE_BOOST
    return tuple(FieldTerm(name, term, boost * weight) for name, boost in boosts.items())


def _feedback(query_terms: Sequence[str], hits: Sequence[Hit]) -> dict[str, float]:
    """RM3 (Lavrenko and Croft's relevance model, interpolated with the query).

    Term weights sum to one: ORIGINAL_WEIGHT spread over the query's terms, the rest over the terms
    most likely in the feedback documents.
    """
    # A relevance model weighs documents by the query's likelihood, which falls off much faster than
    # a BM25 score; the power stands for that.
    likelihood = [(hit.score / hits[0].score) ** LIKELIHOOD_POWER for hit in hits]
    everything = sum(likelihood)
    model: defaultdict[str, float] = defaultdict(float)
    for hit, share in zip(hits, likelihood, strict=True):
        found = content_terms(f"{hit.page.title} {hit.page.content[:_FEEDBACK_CHARS]}")
        counts = Counter(t for t in found if t not in STOP_WORDS and len(t) > 2)
        length = sum(counts.values()) or 1
        for term, n in counts.items():
            model[term] += share / everything * n / length
    best = sorted(model.items(), key=lambda item: (-item[1], item[0]))[:FEEDBACK_TERMS]
    mass = sum(weight for _, weight in best) or 1.0
    weights = dict.fromkeys(query_terms, ORIGINAL_WEIGHT / len(query_terms))
    for term, weight in best:
        weights[term] = weights.get(term, 0.0) + (1 - ORIGINAL_WEIGHT) * weight / mass
    return weights
