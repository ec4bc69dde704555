"""A documented token estimate, and paging of Markdown that can be put together again exactly."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

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
class PageTable:
    """Where a document may be cut, so that taking a page costs no more than the page.

    chars, tokens: totals at the end of every unit. blocks: the block of every unit. frames: header
    and footer of the blocks that repeat them, by block.
    """

    chars: list[int]
    tokens: list[int]
    blocks: list[int]
    frames: dict[int, tuple[str, str]]


def page_table(content: str) -> PageTable:
    """The table of a document, made once, in one pass.

    Every unit has at least one token: blank pieces stick to their neighbour.
    """
    chars: list[int] = []
    tokens: list[int] = []
    blocks: list[int] = []
    frames: dict[int, tuple[str, str]] = {}
    char = token = 0
    for number, block in enumerate(_blocks(content)):
        header, footer, pieces = _split(block)
        if header or footer:
            frames[number] = (header, footer)
        for piece in pieces:
            char += len(piece)
            found = count_tokens(piece)
            if found:
                token += found
                chars.append(char)
                tokens.append(token)
                blocks.append(number)
            elif chars:
                chars[-1] = char
    return PageTable(chars, tokens, blocks, frames)


@dataclass(frozen=True, slots=True)
class Page:
    """text: repeated header + body + closing fence. body: the part that belongs to the document:
    all bodies in order are the document. Token figures count bodies only."""

    text: str
    body: str
    returned: int
    total: int
    next_offset: int | None


def paginate(content: str, offset: int, max_tokens: int, table: PageTable | None = None) -> Page:
    """The page that starts at token `offset`.

    Cuts between blocks, or where whole blocks would leave half of the page empty, between rows,
    lines or sentences. At least one unit (some 800 characters at most) is returned, however small
    `max_tokens` is. table: `page_table(content)`, if it is known.
    """
    table = table or page_table(content)
    total = table.tokens[-1] if table.tokens else 0
    start = bisect_right(table.tokens, offset)
    if start == len(table.tokens):
        return Page("", "", 0, total, None)
    before = table.tokens[start - 1] if start else 0
    end = _page_end(table, start, before + max_tokens)
    body = content[table.chars[start - 1] if start else 0 : table.chars[end - 1]]
    blocks = table.blocks
    continued = start > 0 and blocks[start - 1] == blocks[start]
    header = table.frames.get(blocks[start], ("", ""))[0] if continued else ""
    cut = end < len(blocks) and blocks[end] == blocks[end - 1]
    footer = table.frames.get(blocks[end - 1], ("", ""))[1] if cut else ""
    after = table.tokens[end - 1]
    following = after if end < len(blocks) else None
    return Page(header + body + footer, body, after - before, total, following)


def page_starts(content: str) -> list[tuple[int, int]]:
    """(character, token) position of every place where a page may start, in order."""
    table = page_table(content)
    ends = zip(table.chars, table.tokens, strict=True)
    return [(0, 0), *ends][: len(table.chars)]


def _page_end(table: PageTable, start: int, most: int) -> int:
    """The unit behind the page's last one. most: tokens of the document up to there."""
    end = max(bisect_right(table.tokens, most, start), start + 1)
    if end == len(table.tokens):
        return end
    boundary = end
    while boundary > start and table.blocks[boundary - 1] == table.blocks[boundary]:
        boundary -= 1
    # Whole blocks where they fill half of the page: a long list under a short heading is cut.
    first = table.tokens[start - 1] if start else 0
    kept = (table.tokens[boundary - 1] if boundary else 0) - first
    return boundary if boundary > start and 2 * kept >= most - first else end


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
        start = 0
        while len(piece) - start > _UNIT_CHARS:
            cut = piece.rfind(" ", start + 1, start + _UNIT_CHARS) + 1 or start + _UNIT_CHARS
            out.append(piece[start:cut])
            start = cut
        out.append(piece[start:])
    return out
