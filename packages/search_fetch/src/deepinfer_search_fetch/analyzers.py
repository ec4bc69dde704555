"""Text to index terms. The same code serves documents and queries, in every language.

NFKC, case folding, accents removed; CJK runs become single characters and bigrams; words of a-z
are stemmed; identifiers (snake_case, CamelCase, v4.1, C++) are kept whole and also split.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Final

import tantivy

ANALYZER_VERSION = 2
_MAX_TERM_CHARS = 64
_CACHED_WORDS = 200_000
_CACHED_CHARS = 32
CJK_RANGES: Final = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff"
)
_TOKEN = re.compile(
    rf"[{CJK_RANGES}]+"
    rf"|[^\W{CJK_RANGES}]+(?:[.'’\-][^\W{CJK_RANGES}]+)*(?:\+\+|\#(?!\w))?"  # noqa: RUF001
)
# Where a text may have another normal form that matters for its tokens. An ASCII letter takes the
# accent behind it; ideographs and the marks between them take none, and marks are in no token.
_MAY_CHANGE = re.compile(
    r"[\x00-\x7f]?[^\x00-\x7f\u4e00-\u9fff"
    r"\u2018-\u201d\u3000-\u3003\u3008-\u3011\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f]+"
)
_FIRST_IS_CJK = re.compile(f"[{CJK_RANGES}]")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN = re.compile(r"[a-z]+")
_ENGLISH_STOP_WORDS = """
a an and are as at be been but by can could did do does for from had has have he her his how i if in
into is it its may must no nor not of on or our she should so such than that the their them then
there these they this those to was we were what when where which who why will with would you your
"""
STOP_WORDS: Final = frozenset(_ENGLISH_STOP_WORDS.split())
# Particles, pronouns and question words of Chinese, simplified and traditional.
_FUNCTION_CHARACTERS = frozenset(
    "的了是在和与與及有之其为為于於而吗嗎呢么麼哪何谁誰几幾什怎个個们們这這那些被由从從以对對也都就"
)


def terms(text: str) -> list[str]:
    """Index terms of `text` in order, stop words included."""
    # No token holds white space, and no normal form goes across it.
    return list(chain.from_iterable(map(_TERMS_OF.__getitem__, text.split())))


class WantedTerms(frozenset[str]):
    """Terms to look for."""

    @cached_property
    def initials(self) -> re.Pattern[str] | None:
        """Finds the first characters of its CJK terms; None if it has none."""
        found = sorted({t[0] for t in self if is_cjk(t)})
        return re.compile(f"[{''.join(found)}]") if found else None


def term_places(text: str, wanted: WantedTerms) -> list[tuple[int, str]]:
    """Position and term of all `terms(text)` that are wanted, in order, without making the others:
    a CJK text has two terms a character."""
    if not _FIRST_IS_CJK.search(text):
        return [(i, t) for i, t in enumerate(terms(text)) if t in wanted]
    initials = wanted.initials
    at = 0
    found: list[tuple[int, str]] = []
    for token in _tokens(text):
        if _FIRST_IS_CJK.match(token):
            for match in initials.finditer(token) if initials else ():
                c = match.start()
                if match.group() in wanted:
                    found.append((at + 2 * c, match.group()))
                pair = token[c : c + 2]
                if len(pair) == 2 and pair in wanted:
                    found.append((at + 2 * c + 1, pair))
            at += 2 * len(token) - 1
        else:
            for term in _word_terms(token):
                if term in wanted:
                    found.append((at, term))
                at += 1
    return found


def _tokens(text: str) -> list[str]:
    """The tokens of the text's normal form NFKC."""
    return _TOKEN.findall(_MAY_CHANGE.sub(_normal_form, text))


def _normal_form(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match.group())


def content_terms(text: str) -> list[str]:
    """`terms` without stop words, unless nothing else would be left."""
    found = terms(text)
    return [t for t in found if t not in STOP_WORDS] or found


def is_unigram(term: str) -> bool:
    """True for a single CJK character, which counts less than its bigram in a query."""
    return len(term) == 1 and is_cjk(term)


def is_function_term(term: str) -> bool:
    """True for a CJK term of function characters alone, such as 什么: it names no topic."""
    return all(c in _FUNCTION_CHARACTERS for c in term)


def is_cjk(term: str) -> bool:
    """True for a CJK character or bigram."""
    return _FIRST_IS_CJK.match(term) is not None


class _TermsOf(dict[str, tuple[str, ...]]):
    """What stands between blanks -> its terms, filled on demand: a text is mostly words that were
    seen before, with the same signs around them."""

    def __missing__(self, piece: str) -> tuple[str, ...]:
        words = _tokens(piece)
        found = tuple(chain.from_iterable(map(_terms_of_word, words)))
        # Long pieces and runs of CJK characters are seldom seen twice.
        if len(piece) <= _CACHED_CHARS and not _FIRST_IS_CJK.search(piece):
            if len(self) >= _CACHED_WORDS:
                self.clear()
            self[piece] = found
        return found


def _terms_of_word(word: str) -> tuple[str, ...]:
    return _cjk_terms(word) if _FIRST_IS_CJK.match(word) else _word_terms(word)


_TERMS_OF = _TermsOf()


def _cjk_terms(run: str) -> tuple[str, ...]:
    pairs = chain.from_iterable(zip(run, map("".join, pairwise(run)), strict=False))
    return (*pairs, run[-1])


@lru_cache(maxsize=20_000)
def _word_terms(word: str) -> tuple[str, ...]:
    folded = fold(word)
    if _PLAIN.fullmatch(folded) and (word.islower() or word.istitle() or word.isupper()):
        return (_stem(folded[:_MAX_TERM_CHARS]),)
    whole = folded[:_MAX_TERM_CHARS]
    pieces = [fold(p) for part in re.split(r"[.'’_\-+#]+", word) for p in _pieces(part)]  # noqa: RUF001
    parts = [
        _stem(p[:_MAX_TERM_CHARS]) if _PLAIN.fullmatch(p) else p[:_MAX_TERM_CHARS] for p in pieces
    ]
    return (whole, *parts) if parts and parts != [whole] else (whole,)


def _pieces(part: str) -> list[str]:
    if not part:
        return []
    if part.isascii():
        return _CAMEL.findall(part) or [part]
    return [part]


def fold(word: str) -> str:
    """Case folded, without combining accents."""
    decomposed = unicodedata.normalize("NFD", word.casefold())
    return "".join(c for c in decomposed if not unicodedata.combining(c))


def _stem(word: str) -> str:
    if len(word) < 4 or word in STOP_WORDS:
        return word
    analyzed = _stemmer().analyze(word)
    return analyzed[0] if analyzed else word


@lru_cache(maxsize=1)
def _stemmer() -> tantivy.TextAnalyzer:
    return (
        tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace())
        .filter(tantivy.Filter.stemmer("English"))
        .build()
    )
