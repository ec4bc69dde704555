"""Word documents (WordprocessingML) as HTML."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.dom import small_number
from deepinfer_search_fetch.extract.package import Package, attribute, local

_MAIN = "word/document.xml"
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_HEADING = re.compile(r"heading\s*(\d)", re.I)
_MAX_LEVEL = 8


def docx_html(package: Package, limits: Limits) -> tuple[str, list[str]]:
    """Body text in order: headings, paragraphs, lists, tables, links; no hidden or deleted text."""
    writer = _Writer(package)
    for element in package.stream(_MAIN, (_W + "p", _W + "tbl"), limits.decoded_bytes):
        writer.block(element)
    writer.close_lists(0)
    warnings = [f"hidden_text_removed:{writer.hidden}"] if writer.hidden else []
    return "".join(writer.out), warnings


class _Writer:
    def __init__(self, package: Package) -> None:
        self._links = package.relations(_MAIN)
        self._levels = _heading_levels(package.tree("word/styles.xml"))
        self._ordered = _ordered_lists(package.tree("word/numbering.xml"))
        self._lists: list[str] = []
        self.out: list[str] = []
        self.hidden = 0

    def block(self, element: Any) -> None:
        if local(element) == "tbl":
            self.close_lists(0)
            self.out.append(self._table(element))
        else:
            self._paragraph(element)

    def _paragraph(self, element: Any) -> None:
        content = self._inline(element)
        if content.strip():
            self._write(element, content)
        for box in element.iter(_W + "txbxContent"):
            # Text boxes come twice: for new readers, and as a fallback for old ones.
            if not any(local(a) in ("Fallback", "txbxContent") for a in box.iterancestors()):
                for child in box.iterchildren(_W + "p", _W + "tbl"):
                    self.block(child)

    def _write(self, element: Any, content: str) -> None:
        properties = element.find(_W + "pPr")
        style = _value(properties, "pStyle")
        level = self._levels.get(style, 0)
        outline = _value(properties, "outlineLvl")
        if not level and small_number(outline, 6) < 6:
            level = small_number(outline, 6) + 1
        number = None if properties is None else properties.find(_W + "numPr")
        if level:
            self.close_lists(0)
            self.out.append(f"<h{level}>{content}</h{level}>")
        elif number is not None and _value(number, "numId") not in ("", "0"):
            depth = min(int(_value(number, "ilvl") or 0), _MAX_LEVEL)
            self._item(content, depth, _value(number, "numId"))
        else:
            self.close_lists(0)
            self.out.append(f"<p>{content}</p>")

    def _item(self, content: str, depth: int, number: str) -> None:
        self.close_lists(depth + 1)
        while len(self._lists) <= depth:
            tag = "ol" if (number, depth) in self._ordered else "ul"
            self.out.append(f"<{tag}>")
            self._lists.append(tag)
        self.out.append(f"<li>{content}</li>")

    def close_lists(self, keep: int) -> None:
        while len(self._lists) > keep:
            self.out.append(f"</{self._lists.pop()}>")

    def _table(self, table: Any) -> str:
        rows: list[str] = []
        above: dict[int, str] = {}
        for row in table.iterchildren(_W + "tr"):
            cells: list[str] = []
            column = 0
            for cell in row.iterchildren(_W + "tc"):
                properties = cell.find(_W + "tcPr")
                span = _value(properties, "gridSpan")
                wide = min(small_number(span, 1), 64)
                merge = None if properties is None else properties.find(_W + "vMerge")
                content = "<br>".join(
                    text for p in cell.iter(_W + "p") if (text := self._inline(p)).strip()
                )
                if merge is not None and attribute(merge, "val") != "restart":
                    content = above.get(column, content)
                above[column] = content
                cells.append(f'<td colspan="{wide}">{content}</td>')
                column += wide
            rows.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table>{''.join(rows)}</table>"

    def _inline(self, element: Any) -> str:
        """Text of a paragraph's runs; deleted text, fields' codes and hidden runs are left out."""
        out: list[str] = []
        for child in element:
            kind = local(child)
            if kind == "r":
                out.append(self._run(child))
            elif kind == "hyperlink":
                inner = self._inline(child)
                target, external = self._links.get(attribute(child, "id") or "", ("", False))
                link = escape(target) if external else ""
                out.append(f'<a href="{link}">{inner}</a>' if link else inner)
            elif kind in ("ins", "smartTag", "sdt", "sdtContent", "fldSimple", "moveTo"):
                out.append(self._inline(child))
        return "".join(out)

    def _run(self, run: Any) -> str:
        properties = run.find(_W + "rPr")
        text = "".join(_piece(child) for child in run)
        if not text:
            return ""
        if _is_on(properties, "vanish") or _is_on(properties, "webHidden"):
            self.hidden += 1
            return ""
        if text.strip():
            for name, tag in (("i", "em"), ("b", "strong"), ("strike", "del")):
                if _is_on(properties, name):
                    text = f"<{tag}>{text}</{tag}>"
        return text


def _piece(child: Any) -> str:
    kind = local(child)
    if kind == "t":
        return escape(child.text or "", quote=False)
    return {"tab": " ", "br": "<br>", "cr": "<br>", "noBreakHyphen": "-"}.get(kind, "")


def _value(parent: Any, name: str) -> str:
    child = None if parent is None else parent.find(_W + name)
    return "" if child is None else child.get(_W + "val", "")


def _is_on(properties: Any, name: str) -> bool:
    child = None if properties is None else properties.find(_W + name)
    return child is not None and child.get(_W + "val", "1") not in ("0", "false", "off")


def _heading_levels(styles: Any) -> dict[str, int]:
    """Style id -> heading level, by the style's invariant name or its outline level."""
    levels: dict[str, int] = {"Title": 1}
    for style in styles.iter(_W + "style") if styles is not None else ():
        identifier = style.get(_W + "styleId", "")
        match = _HEADING.match(_value(style, "name"))
        if match:
            levels[identifier] = min(int(match.group(1)) or 1, 6)
        elif _value(style, "name").lower() == "title":
            levels[identifier] = 1
    return levels


def _ordered_lists(numbering: Any) -> set[tuple[str, int]]:
    """(number id, level) of the lists that count instead of showing a bullet."""
    if numbering is None:
        return set()
    abstract: dict[str, list[int]] = {}
    for item in numbering.iter(_W + "abstractNum"):
        abstract[item.get(_W + "abstractNumId", "")] = [
            int(level.get(_W + "ilvl", "0"))
            for level in item.iter(_W + "lvl")
            if _value(level, "numFmt") not in ("bullet", "none", "")
        ]
    return {
        (num.get(_W + "numId", ""), level)
        for num in numbering.iter(_W + "num")
        for level in abstract.get(_value(num, "abstractNumId"), [])
    }
