"""Reads an extraction corpus folder and scores texts against it.

The folder holds `*_dev.jsonl.gz` records {id, url, page_type, metric, text, with, without, html}
and the pages themselves; the metrics are word F1, 4-gram shingle F1 and segment F1.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepinfer_search_fetch.extract.tree import words

_LINK = re.compile(r"!?\[((?:[^\[\]\\]|\\.)*)\]\([^()\s]*\)")
_ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")
_MARKUP = re.compile(
    r"^\s{0,8}(?:#{1,6}\s|>+\s?|[-*+]\s|\|?(?:\s*:?-{3,}:?\s*\|)+\s*$|`{3,}\S*$)", re.M
)


@dataclass(frozen=True)
class Sample:
    id: str
    url: str
    page_type: str
    metric: str
    gold: str
    wanted: list[str]
    unwanted: list[str]
    page: bytes


def read_corpus(folder: Path) -> Iterator[Sample]:
    for file in sorted(folder.glob("*_dev.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                r = json.loads(line)
                page = gzip.decompress((folder / r["html"]).read_bytes())
                yield Sample(
                    r["id"],
                    r["url"],
                    r["page_type"],
                    r["metric"],
                    r["text"],
                    r["with"],
                    r["without"],
                    page,
                )


def markdown_to_text(markdown: str) -> str:
    """Markdown reduced to its text, line by line, without any ambiguous repetition."""
    lines = []
    for line in markdown.split("\n"):
        line = _MARKUP.sub("", line)
        for _ in range(3):
            line = _LINK.sub(r"\1", line)
        line = line.replace("**", "").replace("<br>", " ").replace("`", "").replace("|", " ")
        line = re.sub(r"(?<!\w)\*|\*(?!\w)", "", line)
        lines.append(_ESCAPE.sub(r"\1", line))
    return "\n".join(lines)


def word_f1(text: str, gold: str) -> float:
    return _f1(*_overlap(Counter(words(text)), Counter(words(gold))))


def _shingles(text: str) -> Counter[tuple[str, ...]]:
    w = words(text)
    return Counter(tuple(w[i : i + 4]) for i in range(max(1, len(w) - 3)))


def _overlap(found: Counter, gold: Counter) -> tuple[float, float]:
    common = sum((found & gold).values())
    return common / max(1, sum(found.values())), common / max(1, sum(gold.values()))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def score(samples: list[Sample], texts: dict[str, str]) -> dict[str, float]:
    """All figures of one system: word_f1 (per type, macro), boilerplate, shingle and segment F1."""
    by_type: dict[str, list[float]] = {}
    kept = total = 0
    shingles: list[tuple[float, float]] = []
    hit = wrong = missed = 0
    for s in samples:
        text = texts[s.id]
        flat = _squeeze(text)
        if s.metric == "word_f1":
            by_type.setdefault(s.page_type, []).append(word_f1(text, s.gold))
            total += len(s.unwanted)
            kept += sum(_squeeze(u) in flat for u in s.unwanted)
        elif s.metric == "shingle4":
            shingles.append(_overlap(_shingles(text), _shingles(s.gold)))
        else:
            found = sum(_squeeze(w) in flat for w in s.wanted)
            hit += found
            missed += len(s.wanted) - found
            wrong += sum(_squeeze(u) in flat for u in s.unwanted)
    result: dict[str, float] = {}
    if by_type:
        pages = [f for values in by_type.values() for f in values]
        result["word_f1"] = sum(pages) / len(pages)
        means = {f"word_f1.{t}": sum(v) / len(v) for t, v in sorted(by_type.items())}
        result["word_f1.macro"] = sum(means.values()) / len(means)
        result |= means
        result["boilerplate_kept"] = kept / max(1, total)
    if shingles:
        n = len(shingles)
        result["shingle_f1"] = _f1(sum(p for p, _ in shingles) / n, sum(r for _, r in shingles) / n)
    if hit + wrong + missed:
        result["segment_f1"] = _f1(hit / max(1, hit + wrong), hit / max(1, hit + missed))
    return result
