"""From `[3]` in an answer to the citations of the two chat APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_search_fetch.bridge.policy import Source
from deepinfer_search_fetch.bridge.sealed import Seal

MAX_CITED_CHARS = 150
_MARK = re.compile(r"[ \t]?\[(\d{1,3}(?:, ?\d{1,3}){0,9})\](?![(:])")
_SENTENCE_END = re.compile(r"[.!?](?=\s)|[\u3002\uff01\uff1f]|\n")
_WORD = re.compile(r"[a-z0-9]+|[^\W\d_]", re.I)


@dataclass(frozen=True, slots=True)
class Citation:
    """A claim in a text and what it rests on, in code points of that text.

    start, end: the claim; mark_start, mark_end: its marks, such as " [3]".
    sources: with, for each, the passage of it that supports the claim best.
    """

    start: int
    end: int
    mark_start: int
    mark_end: int
    sources: tuple[tuple[Source, str], ...]


def cite(text: str, sources: Sequence[Source]) -> list[Citation]:
    """The citations that the numbers in brackets make; unknown numbers and links are left alone.

    A claim reaches from the end of the sentence or claim before it to its mark.
    """
    by_number = {s.number: s for s in sources}
    found: list[Citation] = []
    floor = 0
    for mark in _MARK.finditer(text):
        numbers = [int(n) for n in mark.group(1).split(",")]
        known = [by_number[n] for n in dict.fromkeys(numbers) if n in by_number]
        if not known:
            continue
        if found and found[-1].mark_end == mark.start():
            # "claim [1][2]" is one claim with two marks.
            last = found[-1]
            more = tuple((s, _passage(text[last.start : last.end], s.text)) for s in known)
            found[-1] = Citation(
                last.start, last.end, last.mark_start, mark.end(), last.sources + more
            )
        else:
            start = _claim_start(text, floor, mark.start())
            claim = text[start : mark.start()]
            cited = tuple((s, _passage(claim, s.text)) for s in known)
            found.append(Citation(start, mark.start(), mark.start(), mark.end(), cited))
        floor = mark.end()
    return found


def anthropic_blocks(text: str, sources: Sequence[Source], seal: Seal) -> list[dict[str, Any]]:
    """Text blocks of a Messages answer; cited claims are blocks of their own, without marks."""
    blocks: list[dict[str, Any]] = []
    at = 0
    for c in cite(text, sources):
        if c.start > at:
            blocks.append({"type": "text", "text": text[at : c.start]})
        locations = [anthropic_location(source, passage, seal) for source, passage in c.sources]
        blocks.append({"type": "text", "text": text[c.start : c.end], "citations": locations})
        at = c.mark_end
    if at < len(text) or not blocks:
        blocks.append({"type": "text", "text": text[at:]})
    return blocks


def anthropic_location(source: Source, passage: str, seal: Seal) -> dict[str, Any]:
    """A `web_search_result_location`; encrypted_index says which words of which result."""
    start = source.text.find(passage)
    index = {"id": source.id, "url": source.url, "span": [start, start + len(passage)]}
    return {
        "type": "web_search_result_location",
        "url": source.url,
        "title": source.title,
        "encrypted_index": seal.seal(index),
        "cited_text": passage,
    }


def openai_annotations(text: str, sources: Sequence[Source]) -> list[dict[str, Any]]:
    """`url_citation` annotations of an output_text; each covers its mark in the text."""
    return [
        {
            "type": "url_citation",
            "start_index": c.mark_start,
            "end_index": c.mark_end,
            "url": source.url,
            "title": source.title,
        }
        for c in cite(text, sources)
        for source, _ in c.sources
    ]


def _claim_start(text: str, floor: int, end: int) -> int:
    # "Voles eat grass. [1]": the mark follows the sentence's own end, which ends no other claim.
    stops = [m.end() for m in _SENTENCE_END.finditer(text, floor, end)]
    start = next((s for s in reversed(stops) if text[s:end].strip()), floor)
    while start < end and text[start].isspace():
        start += 1
    return start


def _passage(claim: str, text: str) -> str:
    """The sentence of `text` that shares most words with `claim`, cut at a word."""
    wanted = set(_WORD.findall(claim.lower()))
    best, best_score = "", -1.0
    start = 0
    for stop in [m.end() for m in _SENTENCE_END.finditer(text)] + [len(text)]:
        sentence = text[start:stop].strip()
        start = stop
        words = set(_WORD.findall(sentence.lower()))
        score = len(words & wanted) / (len(words) + 4.0) if words else -1.0
        if score > best_score:
            best, best_score = sentence, score
    if len(best) <= MAX_CITED_CHARS:
        return best
    cut = best.rfind(" ", MAX_CITED_CHARS // 2, MAX_CITED_CHARS)
    return best[: cut if cut > 0 else MAX_CITED_CHARS]


def source_of(value: Mapping[str, Any], number: int) -> Source:
    """A source from an opened token."""
    return Source(
        number=number,
        id=str(value.get("id", "")),
        url=str(value.get("url", "")),
        title=str(value.get("title", "")),
        text=str(value.get("text", "")),
    )
