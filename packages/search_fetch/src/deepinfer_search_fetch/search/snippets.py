"""Snippets and summaries: whole sentences by idf-weighted coverage; offsets in code points."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepinfer_search_fetch.index.analyzers import terms
from deepinfer_search_fetch.present import to_text

SNIPPET_CHARS = 200
SUMMARY_CHARS = 800
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")  # noqa: RUF001
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af]|\w+")
_MAX_SENTENCES = 400


def snippet(content: str, idf: dict[str, float]) -> tuple[str, list[tuple[int, int]]]:
    """Text of at most SNIPPET_CHARS and the [start, end) ranges of query words in it."""
    sentences = _sentences(content)
    if not sentences:
        return "", []
    best = max(range(len(sentences)), key=lambda i: (_gain(sentences[i], idf), -i))
    text = sentences[best]
    following = best + 1
    while following < len(sentences) and len(text) + 1 + len(sentences[following]) <= SNIPPET_CHARS:
        text += " " + sentences[following]
        following += 1
    text = _cut(text, SNIPPET_CHARS, idf)
    return text, highlights(text, idf)


def summary(content: str, idf: dict[str, float]) -> str:
    """The lead and the best sentences in document order, joined by an ellipsis where apart."""
    sentences = _sentences(content)
    order = sorted(range(1, len(sentences)), key=lambda i: (-_gain(sentences[i], idf), i))
    chosen: set[int] = set()
    used = 0
    for i in [0, *order] if sentences else []:
        if used + len(sentences[i]) + 3 <= SUMMARY_CHARS:
            chosen.add(i)
            used += len(sentences[i]) + 3
    if not chosen:
        return _cut(sentences[0], SUMMARY_CHARS, idf) if sentences else ""
    parts: list[str] = []
    previous = -1
    for i in sorted(chosen):
        parts.append(("" if not parts else " " if i == previous + 1 else " … ") + sentences[i])
        previous = i
    return "".join(parts)


def highlights(text: str, idf: dict[str, float]) -> list[tuple[int, int]]:
    """Ranges of `text` whose terms the query asked for, adjacent ones merged."""
    found: list[tuple[int, int]] = []
    for match in _WORD.finditer(text):
        if any(t in idf for t in terms(match.group())):
            if found and found[-1][1] == match.start():
                found[-1] = (found[-1][0], match.end())
            else:
                found.append((match.start(), match.end()))
    return found


def _sentences(content: str) -> list[str]:
    text = to_text(content)
    pieces = (" ".join(s.split()) for s in _SENTENCE_END.split(text))
    return [p for p in pieces if p][:_MAX_SENTENCES]


def _gain(sentence: str, idf: dict[str, float]) -> float:
    found = set(terms(sentence[:1000])) & idf.keys()
    # Longer sentences hold more words by chance; very short ones say little.
    return sum(sorted(idf[t] for t in found)) * (1.0 if len(sentence) >= 30 else 0.6)


def _cut(text: str, limit: int, idf: dict[str, float]) -> str:
    """At most `limit` characters around the first query word, never inside a word."""
    if len(text) <= limit:
        return text
    marks: Sequence[tuple[int, int]] = highlights(text, idf)
    start = max(0, min((marks[0][0] if marks else 0) - limit // 4, len(text) - limit))
    room = limit - 2
    if start:
        space = text.find(" ", start, start + 40)
        start = space + 1 if space >= 0 else start
    end = min(len(text), start + room)
    if end < len(text):
        space = text.rfind(" ", start + room // 2, end)
        end = space if space > 0 else end
    return ("…" if start else "") + text[start:end].strip() + ("…" if end < len(text) else "")
