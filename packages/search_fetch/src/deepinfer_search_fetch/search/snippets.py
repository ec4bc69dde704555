"""Snippets and summaries: whole sentences by idf-weighted coverage; offsets in code points."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from deepinfer_search_fetch.analyzers import CJK_RANGES, WantedTerms, is_cjk, term_places
from deepinfer_search_fetch.extract.present import to_text

SNIPPET_CHARS = 200
SUMMARY_CHARS = 800
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")  # noqa: RUF001
_WORD = re.compile(rf"[{CJK_RANGES}]|[^\W{CJK_RANGES}]+")
_MAX_SENTENCES = 400
_READ_CHARS = 24_000
_JOINER = "\u200d"
_WORD_REACH = 40

Weights = Mapping[str, float]


class Passages:
    """The sentences of one page and what each holds of the query (`idf`: weight per term)."""

    def __init__(self, content: str, idf: Weights) -> None:
        text = to_text(content[:_READ_CHARS])
        pieces = (" ".join(s.split()) for s in _SENTENCE_END.split(text))
        self.sentences = [p for p in pieces if p][:_MAX_SENTENCES]
        self._idf = idf
        self._wanted = WantedTerms(idf)
        self._gains = [self._gain(s) for s in self.sentences]

    def _gain(self, sentence: str) -> float:
        found = {t for _, t in term_places(sentence[:1000], self._wanted)}
        # Longer sentences hold more words by chance; very short ones say little.
        return sum(sorted(self._idf[t] for t in found)) * (1.0 if len(sentence) >= 30 else 0.6)

    def snippet(self) -> tuple[str, list[tuple[int, int]]]:
        """Text of at most SNIPPET_CHARS and the [start, end) ranges of query words in it."""
        if not self.sentences:
            return "", []
        best = max(range(len(self.sentences)), key=lambda i: (self._gains[i], -i))
        text = self.sentences[best]
        for following in self.sentences[best + 1 :]:
            if len(text) + 1 + len(following) > SNIPPET_CHARS:
                break
            text = _join(text, following)
        text = _cut(text, SNIPPET_CHARS, self._wanted)
        return text, highlights(text, self._wanted)

    def summary(self) -> str:
        """The lead and the best sentences in document order, joined by an ellipsis where apart."""
        if not self.sentences:
            return ""
        order = sorted(range(1, len(self.sentences)), key=lambda i: (-self._gains[i], i))
        chosen: set[int] = set()
        used = 0
        for i in [0, *order]:
            if used + len(self.sentences[i]) + 3 <= SUMMARY_CHARS:
                chosen.add(i)
                used += len(self.sentences[i]) + 3
        if not chosen:
            return _cut(self.sentences[0], SUMMARY_CHARS, self._wanted)
        out = ""
        previous = -1
        for i in sorted(chosen):
            sentence = self.sentences[i]
            if not out:
                out = sentence
            else:
                out = _join(out, sentence) if i == previous + 1 else f"{out} … {sentence}"
            previous = i
        return out


def highlights(text: str, terms: Iterable[str]) -> list[tuple[int, int]]:
    """Ranges of `text` whose terms are among `terms`, adjacent ones merged."""
    found: list[tuple[int, int]] = []
    wanted = terms if isinstance(terms, WantedTerms) else WantedTerms(terms)
    for match in _WORD.finditer(text):
        word = match.group()
        # A CJK character is its own only term.
        known = unicodedata.normalize("NFKC", word) in wanted
        if known or (not is_cjk(word) and term_places(word, wanted)):
            if found and found[-1][1] == match.start():
                found[-1] = (found[-1][0], match.end())
            else:
                found.append((match.start(), match.end()))
    return found


def _join(left: str, right: str) -> str:
    """Sentences of scripts without blanks stand side by side, others a blank apart."""
    return left + right if left.endswith(("。", "！", "？")) else f"{left} {right}"  # noqa: RUF001


def _cut(text: str, limit: int, terms: WantedTerms) -> str:
    """At most `limit` characters around the first query word, never inside a word or a grapheme."""
    if len(text) <= limit:
        return text
    marks: Sequence[tuple[int, int]] = highlights(text, terms)
    room = limit - 2
    start = max(0, min((marks[0][0] if marks else 0) - limit // 4, len(text) - room))
    start = _boundary(text, start, 1)
    end = min(len(text), start + room)
    end = _boundary(text, end, -1)
    return ("…" if start else "") + text[start:end].strip() + ("…" if end < len(text) else "")


def _boundary(text: str, at: int, step: int) -> int:
    """The nearest place from `at` in direction `step` that cuts no word and no grapheme.

    A word longer than _WORD_REACH is cut, at a grapheme.
    """
    place = at
    while 0 < place < len(text) and _inside_word(text, place):
        place += step
        if abs(place - at) > _WORD_REACH:
            place = at
            break
    while 0 < place < len(text) and _inside_grapheme(text, place):
        place += step
    return place


def _inside_word(text: str, at: int) -> bool:
    before, after = text[at - 1], text[at]
    joined = (before.isalnum() or before == "_") and (after.isalnum() or after == "_")
    return _inside_grapheme(text, at) or (joined and not (is_cjk(before) or is_cjk(after)))


def _inside_grapheme(text: str, at: int) -> bool:
    """Whether a cut at `at` parts a base from its marks, a joined emoji, a flag or a jamo run.

    The cases of Unicode's grapheme clusters (UAX 29) that text on the web holds.
    """
    before, after = text[at - 1], text[at]
    if before == _JOINER or after == _JOINER or (before == "\r" and after == "\n"):
        return True
    if unicodedata.category(after).startswith("M") or "\U0001f3fb" <= after <= "\U0001f3ff":
        return True
    if "\u1160" <= after <= "\u11ff":  # a Korean vowel or final goes with what stands before
        return True
    if _is_flag_letter(before) and _is_flag_letter(after):
        run = 0
        while run < at and _is_flag_letter(text[at - 1 - run]):
            run += 1
        return run % 2 == 1
    return False


def _is_flag_letter(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
