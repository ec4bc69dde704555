"""Workbooks (SpreadsheetML) as HTML tables, row by row without holding a sheet in memory."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from html import escape
from typing import Any

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.dom import small_number
from deepinfer_search_fetch.extract.package import Package, attribute, local
from deepinfer_search_fetch.extract.textual import MAX_CSV_COLUMNS, MAX_CSV_ROWS

_S = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_MAIN = "xl/workbook.xml"
_MAX_SHARED_CHARS = 20_000_000
_DATE_FORMATS = frozenset([*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)])
_DATE_CODE = re.compile(r"[ymdhs]", re.I)
_QUOTED = re.compile(r'"[^"]*"|\\.|\[[^\]]*\]')
_EPOCH_1900, _EPOCH_1904 = datetime(1899, 12, 30), datetime(1904, 1, 1)


def xlsx_html(package: Package, limits: Limits) -> tuple[str, list[str]]:
    """Each visible sheet: its name and at most 1,000 rows of 64 columns. Formulas give the values
    that were saved with them."""
    root = package.tree(_MAIN)
    targets = package.relations(_MAIN)
    sheets = [e for e in root.iter() if local(e) == "sheet"] if root is not None else []
    if root is not None and any(
        local(e) == "workbookPr" and e.get("date1904") in ("1", "true") for e in root.iter()
    ):
        epoch = _EPOCH_1904
    else:
        epoch = _EPOCH_1900
    strings = _shared_strings(package, limits)
    dates = _date_styles(package)
    out: list[str] = []
    warnings: list[str] = []
    for sheet in sheets:
        if sheet.get("state", "visible") != "visible":
            warnings.append("hidden_text_removed:1")
            continue
        identifier = next((v for k, v in sheet.attrib.items() if k.endswith("}id")), "")
        part, _ = targets.get(identifier, ("", False))
        rows = 0
        cells: list[str] = []
        for row in package.stream(part, (_S + "row",), limits.decoded_bytes):
            if row.get("hidden") in ("1", "true"):
                continue
            values = _row(row, strings, dates, epoch)
            if not any(values):
                continue
            rows += 1
            if rows > MAX_CSV_ROWS:
                warnings.append("rows_truncated")
                break
            tag = "th" if rows == 1 else "td"
            cells.append("<tr>" + "".join(f"<{tag}>{escape(v)}</{tag}>" for v in values) + "</tr>")
        name = escape(sheet.get("name", ""))
        out.append(f"<h2>{name}</h2><table>{''.join(cells)}</table>" if cells else "")
    return "".join(out), warnings


def _row(row: Any, strings: list[str], dates: set[int], epoch: datetime) -> list[str]:
    values: list[str] = []
    for cell in row.iterchildren(_S + "c"):
        column = _column(cell.get("r", "")) or len(values)
        if column >= MAX_CSV_COLUMNS:
            break
        values += [""] * (column - len(values))
        values.append(" ".join(_cell(cell, strings, dates, epoch).split()))
    return values


def _column(reference: str) -> int:
    """Zero-based column of a reference such as "AB12"; 0 if there is none."""
    index = 0
    for char in reference[:4]:
        if not char.isascii() or not char.isalpha():
            break
        index = index * 26 + ord(char.upper()) - 64
    return max(index - 1, 0)


def _cell(cell: Any, strings: list[str], dates: set[int], epoch: datetime) -> str:
    kind = cell.get("t", "n")
    if kind == "inlineStr":
        return "".join(t.text or "" for t in cell.iter(_S + "t"))
    value = cell.findtext(_S + "v") or ""
    if kind == "s":
        place = small_number(value, len(strings))
        return strings[place] if place < len(strings) else ""
    if kind == "b":
        return "TRUE" if value == "1" else "FALSE"
    style = cell.get("s", "0")
    if kind == "n" and small_number(style, -1) in dates:
        return _date(value, epoch)
    return value


def _date(value: str, epoch: datetime) -> str:
    try:
        moment = epoch + timedelta(days=round(float(value), 9))
    except (ValueError, OverflowError):
        return value
    text = moment.isoformat(sep=" ", timespec="minutes")
    return text.removesuffix(" 00:00")


def _shared_strings(package: Package, limits: Limits) -> list[str]:
    strings: list[str] = []
    chars = 0
    for item in package.stream("xl/sharedStrings.xml", (_S + "si",), limits.decoded_bytes):
        # Phonetic guides (rPh) repeat the text in another script.
        text = "".join(t.text or "" for t in item.iter(_S + "t") if local(t.getparent()) != "rPh")
        chars += len(text)
        strings.append(text if chars <= _MAX_SHARED_CHARS else "")
    return strings


def _date_styles(package: Package) -> set[int]:
    """Indices of the cell formats that show a number as a date or time."""
    root = package.tree("xl/styles.xml")
    if root is None:
        return set()
    codes = {e.get("numFmtId", ""): e.get("formatCode", "") for e in root.iter(_S + "numFmt")}
    formats = root.find(_S + "cellXfs")
    found: set[int] = set()
    for index, item in enumerate(formats if formats is not None else ()):
        number = attribute(item, "numFmtId") or "0"
        code = _QUOTED.sub("", codes.get(number, ""))
        if small_number(number, -1) in _DATE_FORMATS or _DATE_CODE.search(code):
            found.add(index)
    return found
