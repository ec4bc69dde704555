"""OpenDocument text, slides and sheets as HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.dom import small_number
from deepinfer_search_fetch.extract.package import Package, attribute, local
from deepinfer_search_fetch.extract.textual import MAX_CSV_COLUMNS, MAX_CSV_ROWS

_DROPPED = frozenset(
    ("tracked-changes", "hidden-text", "hidden-paragraph", "annotation", "notes", "forms",
     "sequence-decls", "variable-decls", "bookmark", "note-citation")
)  # fmt: skip
_MAX_DEPTH = 200


def odf_html(package: Package, limits: Limits) -> tuple[str, list[str]]:
    """The body of content.xml in document order."""
    root = package.tree("content.xml")
    body = None if root is None else next((e for e in root.iter() if local(e) == "body"), None)
    out: list[str] = []
    if body is not None:
        _blocks(body, out, 0)
    return "".join(out), []


def _blocks(parent: Any, out: list[str], depth: int) -> None:
    if depth > _MAX_DEPTH:
        return
    for element in parent:
        kind = local(element)
        if kind in _DROPPED or attribute(element, "display") == "none":
            continue
        if kind == "h":
            given = attribute(element, "outline-level") or "1"
            level = min(small_number(given, 1), 6) or 1
            out.append(f"<h{level}>{_inline(element)}</h{level}>")
        elif kind == "p":
            out.append(f"<p>{_inline(element)}</p>")
        elif kind in ("list", "list-item", "list-header"):
            tag = "ul" if kind == "list" else "li"
            out.append(f"<{tag}>")
            _blocks(element, out, depth + 1)
            out.append(f"</{tag}>")
        elif kind == "table":
            if (name := attribute(element, "name")) and local(parent) == "spreadsheet":
                out.append(f"<h2>{escape(name)}</h2>")
            out.append(_table(element))
        else:
            _blocks(element, out, depth + 1)


def _inline(element: Any) -> str:
    out = [escape(element.text or "", quote=False)]
    for child in element:
        kind = local(child)
        if kind == "s" or kind == "tab":
            out.append(" ")
        elif kind == "line-break":
            out.append("<br>")
        elif kind == "a":
            href = attribute(child, "href") or ""
            out.append(f'<a href="{escape(href)}">{_inline(child)}</a>')
        elif kind not in _DROPPED and kind:
            out.append(_inline(child))
        out.append(escape(child.tail or "", quote=False))
    return "".join(out)


def _table(table: Any) -> str:
    rows: list[str] = []
    for row in (e for e in table.iter() if local(e) == "table-row"):
        if len(rows) > MAX_CSV_ROWS:
            break
        cells: list[str] = []
        for cell in row:
            kind = local(cell)
            if kind not in ("table-cell", "covered-table-cell"):
                continue
            text = "<br>".join(_inline(p) for p in cell.iter() if local(p) == "p")
            repeat = attribute(cell, "number-columns-repeated") or "1"
            times = small_number(repeat, 1) if text else 1
            cells += [text] * min(times, MAX_CSV_COLUMNS - len(cells))
        while cells and not cells[-1]:
            cells.pop()
        if cells:
            rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
