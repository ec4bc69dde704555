"""The query language. A malformed operator is literal text, never an error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import date

from deepinfer_search_fetch.analyzers import content_terms, terms
from deepinfer_search_fetch.index.backend import day_number

MAX_TERMS = 48
_TOKEN = re.compile(r'(-?)(?:([a-z]+):)?"([^"]*)"|(\S+)')
_OPERATOR = re.compile(r"(-?)(site|lang|after|before|intitle|inurl|filetype):(\S+)", re.I)
_DOMAIN = re.compile(r"(?:[\w-]+\.)*[\w-]+", re.U)


@dataclass(slots=True)
class ParsedQuery:
    """terms: distinct index terms in order. phrases, excluded: (field, terms), field "any",
    "title" or "url_terms". alternatives: groups of positions in `terms`, one of which must match.
    days: inclusive day numbers."""

    terms: list[str] = field(default_factory=list[str])
    phrases: list[tuple[str, tuple[str, ...]]] = field(
        default_factory=list[tuple[str, tuple[str, ...]]]
    )
    excluded: list[tuple[str, tuple[str, ...]]] = field(
        default_factory=list[tuple[str, tuple[str, ...]]]
    )
    sites: list[str] = field(default_factory=list[str])
    blocked_sites: list[str] = field(default_factory=list[str])
    language: str | None = None
    after: int | None = None
    before: int | None = None
    alternatives: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])


def parse_query(text: str) -> ParsedQuery:
    """Parse user text; everything that is not a well-formed operator is searched for."""
    parsed = ParsedQuery()
    plain: list[str] = []
    pieces = list(_TOKEN.finditer(text))
    words = [m.group(4) or "" for m in pieces]
    either: list[list[str]] = []
    for i, match in enumerate(pieces):
        negative, name, quoted, word = match.groups()
        if quoted is not None:
            _add_phrase(parsed, plain, bool(negative), name, quoted)
        elif word == "OR" and 0 < i < len(pieces) - 1:
            if either and either[-1][-1] == words[i - 1]:
                either[-1].append(words[i + 1])
            else:
                either.append([words[i - 1], words[i + 1]])
        elif not _add_operator(parsed, word):
            if word.startswith("-") and len(word) > 1 and terms(word[1:]):
                parsed.excluded.append(("any", tuple(content_terms(word[1:]))))
            else:
                plain.append(word)
    parsed.terms = list(dict.fromkeys(content_terms(" ".join(plain))))[:MAX_TERMS]
    for group in either:
        positions = {parsed.terms.index(t) for w in group for t in terms(w) if t in parsed.terms}
        if len(positions) > 1:
            parsed.alternatives.append(tuple(sorted(positions)))
    return parsed


def _add_phrase(
    parsed: ParsedQuery, plain: list[str], negative: bool, name: str | None, quoted: str
) -> None:
    # The index holds no stop words: "lord of the rings" is the phrase lord rings there.
    words = tuple(content_terms(quoted))
    if not words:
        return
    target = {"intitle": "title", "inurl": "url_terms"}.get(name or "", "any")
    if negative:
        parsed.excluded.append((target, words))
        return
    parsed.phrases.append((target, words))
    plain.append(quoted)


def _add_operator(parsed: ParsedQuery, word: str) -> bool:
    match = _OPERATOR.fullmatch(word)
    if match is None:
        return False
    negative, name, value = match.group(1), match.group(2).lower(), match.group(3)
    if name == "site":
        domain = value.lower().removeprefix("http://").removeprefix("https://").strip("/.")
        if not _DOMAIN.fullmatch(domain):
            return False
        (parsed.blocked_sites if negative else parsed.sites).append(_ascii(domain))
        return True
    if name in ("after", "before"):
        day = _day(value)
        if day is None or negative:
            return False
        if name == "after":
            parsed.after = day + 1
        else:
            parsed.before = day - 1
        return True
    if name == "lang" and not negative and re.fullmatch(r"[A-Za-z]{2,3}", value):
        parsed.language = value.lower()
        return True
    if name in ("intitle", "inurl", "filetype"):
        words = tuple(terms(value))
        if not words:
            return False
        target = "title" if name == "intitle" else "url_terms"
        (parsed.excluded if negative else parsed.phrases).append((target, words))
        return True
    return False


def _ascii(domain: str) -> str:
    try:
        return domain.encode("idna").decode("ascii") if not domain.isascii() else domain
    except UnicodeError:
        return domain


def _day(value: str) -> int | None:
    match = re.fullmatch(r"(\d{4})(?:-(\d{1,2}))?(?:-(\d{1,2}))?", value)
    if match is None:
        return None
    try:
        day = date(int(match.group(1)), int(match.group(2) or 1), int(match.group(3) or 1))
    except ValueError:
        return None
    return day_number(day.isoformat())
