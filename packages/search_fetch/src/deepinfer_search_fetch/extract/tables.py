"""HTML tables: which are data, and how their grid looks once spans are expanded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepinfer_search_fetch.extract.dom import small_number
from deepinfer_search_fetch.extract.tree import Box, Run

MAX_SPAN = 64
MAX_CELLS = 50_000


@dataclass(frozen=True, slots=True)
class Grid:
    """rows: text of every cell, the first row as wide as any; rectangular up to MAX_CELLS cells.

    header_rows: 0 or 1.
    """

    rows: list[list[str]]
    header_rows: int


def rows_of(table: Box) -> list[Box]:
    """The table's own rows, header rows first; rows of nested tables are not among them."""
    found: list[Box] = []
    stack: deque[Box] = deque([table])
    while stack:
        box = stack.popleft()
        for child in box.children:
            if isinstance(child, Box):
                if child.tag == "tr":
                    found.append(child)
                elif child.tag in ("thead", "tbody", "tfoot"):
                    stack.append(child)
    return sorted(found, key=lambda row: row.parent is None or row.parent.tag != "thead")


def cells_of(row: Box) -> list[Box]:
    return [c for c in row.children if isinstance(c, Box) and c.tag in ("td", "th")]


def is_data_table(table: Box) -> bool:
    """False for a table used for layout: one row or column, or cells full of blocks."""
    if table.element.get("role") in ("presentation", "none"):
        return False
    rows = rows_of(table)
    cells = [c for row in rows for c in cells_of(row)]
    nested = sum(_has(c, "table") for c in cells)
    if nested and not (rows and nested * 4 <= len(cells) and _is_header(rows[0])):
        return False
    widest = max((len(cells_of(row)) for row in rows), default=0)
    if len(rows) < 2 or widest < 2:
        return False
    heavy = sum(_is_heavy(c) for c in cells)
    return heavy <= 0.5 * len(cells)


def build_grid(table: Box, cell_text: Callable[[Box], str]) -> Grid:
    """The expanded grid: a spanning cell's value is repeated in every place it covers."""
    grid: list[list[str]] = []
    pending: dict[tuple[int, int], str] = {}
    rows = rows_of(table)
    total = 0
    for r, row in enumerate(rows):
        line: list[str] = []
        for cell in cells_of(row):
            while (r, len(line)) in pending:
                line.append(pending.pop((r, len(line))))
            text = cell_text(cell)
            wide, high = _span(cell, "colspan"), _span(cell, "rowspan")
            total += wide * high
            if total > MAX_CELLS:
                wide = high = 1
            for _ in range(wide):
                for below in range(1, min(high, len(rows) - r)):
                    pending[(r + below, len(line))] = text
                line.append(text)
        while (r, len(line)) in pending:
            line.append(pending.pop((r, len(line))))
        grid.append(line)
    width = max((len(line) for line in grid), default=0)
    # A short row is valid, and filled up by whoever draws it; only the header sets the width.
    short = grid if len(grid) * width <= MAX_CELLS else grid[:1]
    for line in short:
        line += [""] * (width - len(line))
    return Grid(grid, min(1, len(grid)))


def to_markdown(grid: Grid) -> str:
    """A GFM table; the first row is the header, empty rows are left out."""
    head, *body = [row for i, row in enumerate(grid.rows) if i < grid.header_rows or any(row)]
    lines = [_line(head), _line(["---"] * len(head)), *(_line(row) for row in body)]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _span(cell: Box, name: str) -> int:
    return max(1, min(MAX_SPAN, small_number(cell.element.get(name), 1)))


def _has(box: Box, tag: str) -> bool:
    return any(child.tag == tag for child in _boxes(box))


def _boxes(box: Box) -> Iterator[Box]:
    stack = [c for c in box.children if isinstance(c, Box)]
    while stack:
        current = stack.pop()
        yield current
        stack += [c for c in current.children if isinstance(c, Box)]


def _is_header(row: Box) -> bool:
    return all(c.tag == "th" for c in cells_of(row))


def _is_heavy(cell: Box) -> bool:
    """A cell that holds several paragraphs, headings or a quotation is a place, not a value."""
    blocks = [b for b in _boxes(cell) if b.tag not in ("ul", "ol", "li")]
    paragraphs = sum(
        b.tag in ("p", "div") and any(isinstance(c, Run) for c in b.children) for b in blocks
    )
    return paragraphs > 1 or any(b.tag in ("h1", "h2", "h3", "blockquote") for b in blocks)
