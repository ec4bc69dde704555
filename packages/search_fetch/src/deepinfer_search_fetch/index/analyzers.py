"""Text to index terms. The same code serves documents and queries, in every language.

NFKC, case folding, accents removed; CJK runs become single characters and bigrams; words of a-z
are stemmed; identifiers (snake_case, CamelCase, v4.1, C++) are kept whole and also split.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final

import tantivy

ANALYZER_VERSION = 1
_MAX_TERM_CHARS = 64
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff"
_TOKEN = re.compile(
    rf"(?P<cjk>[{_CJK}]+)"
    rf"|(?P<word>[^\W{_CJK}]+(?:[.'’\-][^\W{_CJK}]+)*(?:\+\+|\#(?!\w))?)"  # noqa: RUF001
)
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN = re.compile(r"[a-z]+")
_ENGLISH_STOP_WORDS = """
a an and are as at be been but by can could did do does for from had has have he her his how i if in
into is it its may must no nor not of on or our she should so such than that the their them then
there these they this those to was we were what when where which who why will with would you your
"""
STOP_WORDS: Final = frozenset(_ENGLISH_STOP_WORDS.split())


def terms(text: str) -> list[str]:
    """Index terms of `text` in order, stop words included."""
    found: list[str] = []
    for match in _TOKEN.finditer(unicodedata.normalize("NFKC", text)):
        if match.lastgroup == "cjk":
            found += _cjk_terms(match.group())
        else:
            found += _word_terms(match.group())
    return found


def content_terms(text: str) -> list[str]:
    """`terms` without stop words, unless nothing else would be left."""
    found = terms(text)
    return [t for t in found if t not in STOP_WORDS] or found


def is_unigram(term: str) -> bool:
    """True for a single CJK character, which counts less than its bigram in a query."""
    return len(term) == 1 and is_cjk(term)


def is_cjk(term: str) -> bool:
    """True for a CJK character or bigram."""
    return bool(re.match(f"[{_CJK}]", term))


def _cjk_terms(run: str) -> list[str]:
    out: list[str] = []
    for i, character in enumerate(run):
        out.append(character)
        if i + 1 < len(run):
            out.append(run[i : i + 2])
    return out


@lru_cache(maxsize=500_000)
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
