"""Plain text, Markdown, JSON, XML and CSV as Markdown."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass, field
from typing import Any, cast

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.extract.hidden import strip_invisible_characters

MAX_CSV_ROWS = 1000
MAX_CSV_COLUMNS = 64
MAX_JSON_CHARS = 400_000
_MAX_LINKS = 10_000  # made absolute; what comes behind them stays as it is
_MARKDOWN_LINK = re.compile(
    r"(!?\[(?:[^\[\]\\]|\\.){0,500}\]\()([^()\s]{1,2000})((?:\s\"[^\"]{0,300}\")?\))"
)
_HEADING = re.compile(r"^#\s+(.{1,300})$", re.M)


@dataclass(frozen=True, slots=True)
class TextDocument:
    content: str
    title: str | None = None
    links: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    warnings: list[str] = field(default_factory=list[str])
    author: str | None = None
    published: str | None = None
    modified: str | None = None


def extract_text(text: str, kind: str, url: urls.Url | None) -> TextDocument:
    """Dispatch on `kind` ("text", "markdown", "json", "xml", "csv")."""
    text = strip_invisible_characters(text).replace("\r\n", "\n").replace("\r", "\n")
    if kind == "markdown":
        return _markdown(text, url)
    if kind == "json":
        return _json(text)
    if kind == "csv":
        return _csv(text)
    if kind == "xml":
        return TextDocument(fenced(text.strip(), "xml"))
    return TextDocument(text.strip() + "\n" if text.strip() else "")


def fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any in `text`."""
    longest = max((len(m) for m in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}\n"


def _markdown(text: str, url: urls.Url | None) -> TextDocument:
    """Passed through with absolute links."""
    links: list[tuple[str, str]] = []
    met = 0

    def absolute(match: re.Match[str]) -> str:
        nonlocal met
        met += 1
        if met > _MAX_LINKS:
            return match.group()
        try:
            target = str(urls.join(url, match.group(2)) if url else urls.parse(match.group(2)))
        except SearchFetchError:
            return match.group()
        if not match.group(1).startswith("!"):
            links.append((target, match.group(1)[1:-2]))
        return f"{match.group(1)}{target}{match.group(3)}"

    body = _MARKDOWN_LINK.sub(absolute, text).strip()
    heading = _HEADING.search(body)
    return TextDocument(
        body + "\n" if body else "", heading.group(1).strip() if heading else None, links
    )


def _json(text: str) -> TextDocument:
    """Pretty JSON; too large a document is cut behind a whole element, so that it stays valid."""
    warnings: list[str] = []
    if len(text) > MAX_JSON_CHARS:
        text = _json_prefix(text)
        warnings.append("json_truncated")
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return TextDocument(text.strip() + "\n", warnings=["invalid_json"])
    pretty = _pretty(data)
    title = cast(dict[str, Any], data).get("title") if isinstance(data, dict) else None
    # Half a surrogate pair is legal in JSON only as the escape it came as.
    pretty = pretty.encode("utf-8", "backslashreplace").decode()
    return TextDocument(
        fenced(pretty, "json"),
        title.encode("utf-8", "replace").decode() if isinstance(title, str) else None,
        warnings=warnings,
    )


def _pretty(data: Any) -> str:
    """Indented, or on one line where the indents would be most of it (deep nesting)."""
    pieces: list[str] = []
    size = 0
    for piece in json.JSONEncoder(ensure_ascii=False, indent=2).iterencode(data):
        pieces.append(piece)
        size += len(piece)
        if size > 4 * MAX_JSON_CHARS:
            return json.dumps(data, ensure_ascii=False)
    return "".join(pieces)


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.S)
_CLOSERS = {"[": "]", "{": "}"}


def _json_prefix(text: str) -> str:
    """The longest beginning within MAX_JSON_CHARS that ends behind a whole element, closed."""
    open_: list[str] = []
    end, closers = 0, ""
    for token in _JSON_TOKEN.finditer(text, 0, MAX_JSON_CHARS):
        sign = token.group()
        if sign in _CLOSERS:
            open_.append(_CLOSERS[sign])
            continue
        if sign == ",":
            end = token.start()
        elif sign in ("]", "}"):
            if not open_:
                break
            open_.pop()
            end = token.end()
        else:
            continue
        closers = "".join(reversed(open_))
    return text[:end] + closers


def _csv(text: str) -> TextDocument:
    sample = text[:8192]
    delimiter = "\t" if sample.count("\t") > sample.count(",") else ","
    if sample.count(";") > max(sample.count(delimiter), 1):
        delimiter = ";"
    rows: list[list[str]] = []
    warnings: list[str] = []
    try:
        for row in csv.reader(io.StringIO(text), delimiter=delimiter):
            if len(rows) > MAX_CSV_ROWS:
                warnings.append("rows_truncated")
                break
            if row:
                rows.append([_cell(c) for c in row[:MAX_CSV_COLUMNS]])
    except csv.Error:
        warnings.append("invalid_csv")
    if not rows:
        return TextDocument(text.strip() + "\n" if text.strip() else "", warnings=warnings)
    width = max(len(row) for row in rows)
    head, *body = [row + [""] * (width - len(row)) for row in rows]
    lines = [head, ["---"] * width, *body]
    return TextDocument(
        "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n", warnings=warnings
    )


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")
