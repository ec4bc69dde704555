"""A documented token estimate, and paging of Markdown that can be put together again exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

TOKENIZER = "est@1"
_UNIT_CHARS = 800
_ASCII_WORD = re.compile(r"[A-Za-z0-9_]+")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af]")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")  # noqa: RUF001
_TABLE_RULE = re.compile(r"\|(?: --- \|)+$")


def count_tokens(text: str) -> int:
    """est@1: ASCII words ceil(len/4), each CJK character 1, any other character 0.5, rounded up."""
    lengths = list(map(len, _ASCII_WORD.findall(text)))
    cjk = 0 if text.isascii() else len(_CJK.findall(text))
    others = sum(map(len, text.split())) - sum(lengths) - cjk
    return sum([(n + 3) // 4 for n in lengths]) + cjk + (others + 1) // 2


@dataclass(frozen=True, slots=True)
class _Unit:
    """The smallest piece a page may end after; `header` is repeated when a page starts here."""

    text: str
    tokens: int
    block: int
    header: str
    footer: str


@dataclass(frozen=True, slots=True)
class Page:
    """text: repeated header + body + closing fence. body: the part that belongs to the document:
    all bodies in order are the document. Token figures count bodies only."""

    text: str
    body: str
    returned: int
    total: int
    next_offset: int | None


def paginate(content: str, offset: int, max_tokens: int) -> Page:
    """The page that starts at token `offset`.

    Cuts between blocks; a block larger than the page is cut between rows, lines or sentences. At
    least one unit (some 800 characters at most) is returned, however small `max_tokens` is.
    """
    units = _units(content)
    total = sum(u.tokens for u in units)
    start = position = 0
    for unit in units:
        if position + unit.tokens > offset:
            break
        position += unit.tokens
        start += 1
    if start == len(units):
        return Page("", "", 0, total, None)
    end = _page_end(units, start, max_tokens)
    chosen = units[start:end]
    body = "".join(u.text for u in chosen)
    header = chosen[0].header if start and units[start - 1].block == chosen[0].block else ""
    cut = end < len(units) and units[end].block == chosen[-1].block
    footer = chosen[-1].footer if cut else ""
    returned = sum(u.tokens for u in chosen)
    following = position + returned if end < len(units) else None
    return Page(header + body + footer, body, returned, total, following)


def page_starts(content: str) -> list[tuple[int, int]]:
    """(character, token) position of every place where a page may start, in order."""
    starts: list[tuple[int, int]] = []
    char = token = 0
    for unit in _units(content):
        starts.append((char, token))
        char += len(unit.text)
        token += unit.tokens
    return starts


def _page_end(units: list[_Unit], start: int, max_tokens: int) -> int:
    used = 0
    end = start
    while end < len(units) and used + units[end].tokens <= max_tokens:
        used += units[end].tokens
        end += 1
    if end == len(units):
        return end
    boundary = end
    while boundary > start and units[boundary - 1].block == units[boundary].block:
        boundary -= 1
    # Whole blocks if at least one fits; else part of the block, but always something.
    return boundary if boundary > start else max(end, start + 1)


def _units(content: str) -> list[_Unit]:
    """Every unit has at least one token: blank pieces stick to their neighbour."""
    units: list[_Unit] = []
    blank = ""
    for number, block in enumerate(_blocks(content)):
        header, footer, pieces = _split(block)
        for piece in pieces:
            tokens = count_tokens(piece)
            if tokens:
                units.append(_Unit(blank + piece, tokens, number, header, footer))
                blank = ""
            elif units:
                units[-1] = replace(units[-1], text=units[-1].text + piece)
            else:
                blank += piece
    return units


def _blocks(content: str) -> list[str]:
    """Blocks with the blank lines after them; a fence is one block, blank lines inside or not."""
    blocks: list[str] = []
    current: list[str] = []
    fence = ""
    blank = False
    for line in content.splitlines(keepends=True):
        stripped = line.strip()
        if not fence and blank and stripped:
            blocks.append("".join(current))
            current = []
        mark = re.match(r"`{3,}", stripped)
        if fence:
            fence = "" if stripped == fence else fence
        elif mark:
            fence = mark.group()
        blank = not stripped and not fence
        current.append(line)
    return [*blocks, "".join(current)] if current else blocks


def _split(block: str) -> tuple[str, str, list[str]]:
    """(header to repeat, footer to close with, pieces) of one block; pieces add up to the block."""
    lines = block.splitlines(keepends=True)
    if block.startswith("```"):
        fence = re.match(r"`{3,}", block)
        close = fence.group() if fence else "```"
        return lines[0], close + "\n", _bounded(lines)
    if len(lines) > 2 and _TABLE_RULE.match(lines[1].strip()):
        return lines[0] + lines[1], "", _bounded(["".join(lines[:2]), *lines[2:]])
    pieces: list[str] = []
    for line in lines:
        last = 0
        for match in _SENTENCE.finditer(line):
            pieces.append(line[last : match.end()])
            last = match.end()
        pieces.append(line[last:])
    return "", "", _bounded([p for p in pieces if p])


def _bounded(pieces: list[str]) -> list[str]:
    """Pieces of at most _UNIT_CHARS characters, cut at a blank where there is one."""
    out: list[str] = []
    for piece in pieces:
        rest = piece
        while len(rest) > _UNIT_CHARS:
            cut = rest.rfind(" ", 1, _UNIT_CHARS) + 1 or _UNIT_CHARS
            out.append(rest[:cut])
            rest = rest[cut:]
        out.append(rest)
    return out
