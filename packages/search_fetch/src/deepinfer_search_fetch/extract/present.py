"""The other formats of a result, all made from its Markdown: text, HTML, outline."""

from __future__ import annotations

import re
from bisect import bisect_right

from deepinfer_search_fetch.extract.tokens import page_starts
from deepinfer_search_fetch.models import OutlineEntry

_HEADING = re.compile(r"(#{1,6}) (.+)")
_MARKED = re.compile(r"[\[*`\\]")
_LINK = re.compile(r"!?\[((?:[^\[\]\\]|\\.){0,2000})\]\([^()\s]{0,4000}\)")
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_TABLE_RULE = re.compile(r"\|(?: --- \|)+")
_EMPHASIS = re.compile(r"(?<![\w\\*])\*{1,2}(?=\S)|(?<=[^\s\\])\*{1,2}(?![\w*])")


def to_text(markdown: str) -> str:
    """Plain text: markup removed line by line, code and tables kept as text."""
    out: list[str] = []
    fence = ""
    for line in markdown.split("\n"):
        mark = re.match(r"\s*(`{3,})", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark.group(1)
            continue
        if fence:
            out.append(line)
            continue
        if _TABLE_RULE.fullmatch(line):
            continue
        if line.startswith("| "):
            line = line.strip("| ").replace(" | ", "\t").replace("<br>", " ")
        line = re.sub(r"^((?:> )*)#{1,6} ", r"\1", line)
        line = re.sub(r"^(?:> ?)+", "", line)
        out.append(inline_text(line))
    return "\n".join(out)


def inline_text(line: str) -> str:
    """One line of Markdown without links, emphasis, code marks and escapes."""
    if not _MARKED.search(line):
        return line
    for _ in range(2):
        line = _LINK.sub(r"\1", line)
    line = _EMPHASIS.sub("", line)
    line = re.sub(r"(?<!\\)`+", "", line)
    return _ESCAPED.sub(r"\1", line)


def to_html(markdown: str) -> str:
    """Clean HTML: only elements Markdown knows, raw HTML escaped."""
    from markdown_it import MarkdownIt

    renderer = MarkdownIt("commonmark", {"html": False}).enable("table").enable("strikethrough")
    return str(renderer.render(markdown))


def outline(markdown: str) -> list[OutlineEntry]:
    """Headings with the token offset at which a page that starts with them begins."""
    entries: list[OutlineEntry] = []
    starts = page_starts(markdown)
    position = 0
    fence = ""
    for line in markdown.splitlines(keepends=True):
        mark = re.match(r"`{3,}", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark.group()
        heading = None if fence else _HEADING.match(line)
        if heading:
            entries.append(
                OutlineEntry(
                    level=len(heading.group(1)),
                    title=inline_text(heading.group(2)).strip(),
                    # A heading begins a line, and every line begins a possible page.
                    token_offset=starts[bisect_right(starts, position, key=_char) - 1][1],
                )
            )
        position += len(line)
    return entries


def _char(start: tuple[int, int]) -> int:
    return start[0]
