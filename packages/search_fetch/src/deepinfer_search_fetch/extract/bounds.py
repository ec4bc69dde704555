"""What a page may cost the voters: beyond these bounds the quick extractor answers.

Pages that people read stay far below: the largest of 250 evaluation pages has 1,000 runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]

from deepinfer_search_fetch.extract.tree import Run

MAX_RUNS = 4_000
MAX_TEXT_CHARS = 1_000_000
MAX_GRID_CELLS = 50_000
_MAX_SPAN = 100  # the voters take wider spans, and wider rows, for this wide


@dataclass(slots=True)
class _Table:
    rows: list[int] = field(default_factory=list[int])  # the width of each
    covered: int = 0  # places that spanning cells take
    spanning: list[html.HtmlElement] = field(default_factory=list[html.HtmlElement])

    def grid_cells(self) -> int:
        """Cells once spans are expanded and every row is as wide as the widest."""
        widest = min(max(self.rows, default=0), _MAX_SPAN)
        return max(len(self.rows) * widest, self.covered)


def bound_spans(tree: html.HtmlElement) -> None:
    """Tables whose spans would make a huge grid lose them: a voter expands what is declared."""
    for table in _tables(tree):
        if table.grid_cells() > MAX_GRID_CELLS:
            for cell in table.spanning:
                for name in ("colspan", "rowspan"):
                    cell.attrib.pop(name, None)


def too_large(tree: html.HtmlElement, runs: Sequence[Run]) -> bool:
    """Whether a page without huge spans is still too much for the voters."""
    return (
        len(runs) > MAX_RUNS
        or sum(len(run.text) for run in runs) > MAX_TEXT_CHARS
        or sum(table.grid_cells() for table in _tables(tree)) > MAX_GRID_CELLS
    )


def _tables(tree: html.HtmlElement) -> Iterator[_Table]:
    """Every table with its own rows and cells, in one pass however deep they nest."""
    open_tables = [_Table()]  # the first holds rows outside of any table
    names = ("table", "tr", "td", "th")
    for event, element in etree.iterwalk(tree, events=("start", "end"), tag=names):
        if element.tag == "table":
            if event == "start":
                open_tables.append(_Table())
            else:
                yield open_tables.pop()
        elif event == "start":
            table = open_tables[-1]
            if element.tag == "tr" or not table.rows:
                table.rows.append(0)
            if element.tag != "tr":
                wide, high = _span(element, "colspan"), _span(element, "rowspan")
                table.rows[-1] += wide
                if wide * high > 1:
                    table.covered += wide * high
                    table.spanning.append(element)


def _span(cell: html.HtmlElement, name: str) -> int:
    value = cell.get(name, "1")
    if not (value.isascii() and value.isdigit()):
        return 1
    return _MAX_SPAN if len(value) > 3 else max(1, min(_MAX_SPAN, int(value)))
