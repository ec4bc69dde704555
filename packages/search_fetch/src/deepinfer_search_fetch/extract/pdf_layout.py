"""Reading order of a PDF page: tables by ruled lines, columns by gutters, lines, paragraphs."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from dataclasses import dataclass
from statistics import median

from deepinfer_search_fetch.extract.pdf_page import PageContent, Rule, Run

_SNAP = 3.0  # points within which two ruled lines are one
_MAX_CELLS = 5000
_MIN_FILLED = 0.4
_MIN_COLUMN_LINES = 4
_MIN_FULLNESS = 0.5
_MAX_COLUMN_SPLITS = 3


@dataclass(slots=True)
class Line:
    """One line of running text in reading order."""

    text: str
    x0: float
    y0: float
    x1: float
    y1: float
    size: float


@dataclass(slots=True)
class Table:
    """Cells found between ruled lines, row by row from the top."""

    rows: list[list[str]]
    box: tuple[float, float, float, float]


def reading_order(page: PageContent) -> list[Line | Table]:
    """Lines and tables of a page in the order a person reads them."""
    tables, rest = find_tables(page)
    # A table takes part in the ordering like one big run.
    stand_ins = {f"\0{i}": table for i, table in enumerate(tables)}
    runs = [*rest, *(Run(key, *table.box) for key, table in stand_ins.items())]
    return [stand_ins.get(line.text, line) for line in _order(runs, _MAX_COLUMN_SPLITS)]


def find_tables(page: PageContent) -> tuple[list[Table], list[Run]]:
    """Tables drawn with lines in both directions, and the runs outside them."""
    tables: list[Table] = []
    rest = page.runs
    for horizontal, vertical in _components(page.horizontal, page.vertical):
        xs, ys = _snap([v.at for v in vertical]), _snap([h.at for h in horizontal])
        if len(xs) < 3 or len(ys) < 3 or (len(xs) - 1) * (len(ys) - 1) > _MAX_CELLS:
            continue
        cells: dict[tuple[int, int], list[Run]] = {}
        outside: list[Run] = []
        for run in rest:
            column = bisect.bisect(xs, (run.x0 + run.x1) / 2) - 1
            row = bisect.bisect(ys, (run.y0 + run.y1) / 2) - 1
            if 0 <= column < len(xs) - 1 and 0 <= row < len(ys) - 1:
                cells.setdefault((row, column), []).append(run)
            else:
                outside.append(run)
        rows = [
            [" ".join(line.text for line in _lines(cells.get((r, c), [])))
             for c in range(len(xs) - 1)]
            for r in reversed(range(len(ys) - 1))
        ]  # fmt: skip
        rows = [row for row in rows if any(row)]
        used = [c for c in range(len(xs) - 1) if any(row[c] for row in rows)]
        rows = [[row[c] for c in used] for row in rows]
        filled = sum(bool(cell) for row in rows for cell in row)
        if len(rows) >= 2 and len(used) >= 2 and filled >= _MIN_FILLED * len(rows) * len(used):
            tables.append(Table(rows, (xs[0], ys[0], xs[-1], ys[-1])))
            rest = outside
    return tables, rest


def _components(
    horizontal: list[Rule], vertical: list[Rule]
) -> list[tuple[list[Rule], list[Rule]]]:
    """Groups of ruled lines that touch each other, joined by union-find."""
    count = len(horizontal) + len(vertical)
    if not horizontal or not vertical or len(horizontal) * len(vertical) > 1_000_000:
        return []
    parent = list(range(count))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, h in enumerate(horizontal):
        for j, v in enumerate(vertical, len(horizontal)):
            crosses = h.start - _SNAP <= v.at <= h.end + _SNAP
            if crosses and v.start - _SNAP <= h.at <= v.end + _SNAP:
                parent[find(i)] = find(j)
    groups: dict[int, tuple[list[Rule], list[Rule]]] = {}
    for i, rule in enumerate([*horizontal, *vertical]):
        groups.setdefault(find(i), ([], []))[i >= len(horizontal)].append(rule)
    return list(groups.values())


def _snap(values: list[float]) -> list[float]:
    out: list[float] = []
    for value in sorted(values):
        if not out or value - out[-1] > _SNAP:
            out.append(value)
    return out


def _order(runs: list[Run], splits: int) -> list[Line]:
    """Lines of one region: column by column between the runs that span the gutter."""
    gutter = _gutter(runs) if splits else None
    if gutter is None:
        return _lines(runs)
    spanning = sorted((r for r in runs if r.x0 < gutter < r.x1), key=lambda r: -r.y1)
    out: list[Line] = []
    left = [r for r in runs if r.x1 <= gutter]
    right = [r for r in runs if r.x0 >= gutter]
    for line in _lines(spanning):
        middle = (line.y0 + line.y1) / 2
        for side in (left, right):
            out += _order([r for r in side if r.y0 > middle], splits - 1)
        left = [r for r in left if r.y0 <= middle]
        right = [r for r in right if r.y0 <= middle]
        out.append(line)
    return out + _order(left, splits - 1) + _order(right, splits - 1)


def _gutter(runs: list[Run]) -> float | None:
    """The x of a gap between two columns of running text; None for one column or for a table.

    Most lines on both sides must fill their column, which cells of a table without rules do not.
    """
    if len(runs) < 2 * _MIN_COLUMN_LINES:
        return None
    x0, x1 = min(r.x0 for r in runs), max(r.x1 for r in runs)
    width = x1 - x0
    size = median(r.size for r in runs)
    bins = max(int(width / 2), 1)
    cover = [0] * (bins + 1)
    for run in runs:
        for b in range(int((run.x0 - x0) / 2), min(int((run.x1 - x0) / 2), bins) + 1):
            cover[b] += 1
    best: tuple[float, float] | None = None
    start = None
    most = max(1, len(runs) // 10)
    for b in range(int(bins * 0.15), int(bins * 0.85) + 1):
        free = cover[b] <= most
        if free and start is None:
            start = b
        if start is not None and (not free or b == int(bins * 0.85)):
            wide = 2.0 * (b - start)
            if wide >= max(6.0, 0.5 * size) and (best is None or wide > best[0]):
                best = (wide, x0 + start + b)
            start = None
    if best is None:
        return None
    gutter = best[1]
    sides = [[r for r in runs if r.x1 <= gutter], [r for r in runs if r.x0 >= gutter]]
    for side in sides:
        lines = _lines(side)
        if len(lines) < _MIN_COLUMN_LINES:
            return None
        column = max(r.x1 for r in side) - min(r.x0 for r in side)
        if median(line.x1 - line.x0 for line in lines) < _MIN_FULLNESS * column:
            return None
    overlap = min(max(r.y1 for r in s) for s in sides) - max(min(r.y0 for r in s) for s in sides)
    shorter = min(max(r.y1 for r in s) - min(r.y0 for r in s) for s in sides)
    return gutter if overlap >= 0.5 * shorter else None


def _lines(runs: list[Run]) -> list[Line]:
    """Runs of the same height joined from left to right, lines from top to bottom."""
    out: list[Line] = []
    row: list[Run] = []

    def close() -> None:
        if not row:
            return
        row.sort(key=lambda r: r.x0)
        text = row[0].text
        for before, run in itertools.pairwise(row):
            text += ("" if run.x0 - before.x1 < 0.1 * run.size else " ") + run.text
        sizes = Counter[float]()
        for run in row:
            sizes[round(run.size * 2) / 2] += len(run.text)
        out.append(
            Line(
                text,
                row[0].x0,
                min(r.y0 for r in row),
                max(r.x1 for r in row),
                max(r.y1 for r in row),
                sizes.most_common(1)[0][0],
            )
        )
        row.clear()

    for run in sorted(runs, key=lambda r: (-(r.y0 + r.y1), r.x0)):
        if row:
            top, bottom = max(r.y1 for r in row), min(r.y0 for r in row)
            overlap = min(top, run.y1) - max(bottom, run.y0)
            if overlap < 0.5 * min(run.size, row[0].size):
                close()
        row.append(run)
    close()
    return out
