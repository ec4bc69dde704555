"""A file, or every readable file below a folder, and JSON lines of ready pages."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.sources.item import Item, RawDocument, Skip, timestamp

MAX_FILE_BYTES = 50 * 1024 * 1024
MAX_LINE_CHARS = 16 * 1024 * 1024
_HEADERS = {
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".csv": "text/csv",
    ".txt": "text/plain",
    ".json": "application/json",
    ".html": None,
    ".htm": None,
    ".xhtml": None,
    ".pdf": "application/pdf",
    ".docx": None,
    ".pptx": None,
    ".xlsx": None,
    ".odt": None,
    ".epub": None,
}


def read_files(path: Path) -> Iterator[Item]:
    """A file, or the readable files below a folder in name order; links are not followed."""
    if not path.exists():
        raise InvalidRequestError("not_found", f"{path} does not exist")
    for file in [path] if path.is_file() else _walk(path):
        suffix = file.suffix.lower()
        if suffix not in _HEADERS:
            yield Skip("file_type")
            continue
        try:
            status = file.stat()
            if status.st_size > MAX_FILE_BYTES:
                yield Skip("too_large")
                continue
            body = file.read_bytes()
        except OSError:
            yield Skip("unreadable", failed=True)
            continue
        yield RawDocument(
            body, file.resolve().as_uri(), _HEADERS[suffix], timestamp(status.st_mtime), file.stem
        )


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            file = Path(root) / name
            if not file.is_symlink():
                yield file


def read_jsonl(path: Path) -> Iterator[Item]:
    """Lines {"url", "title", "text" or "content", "language"?, "published"?, "site_name"?,
    "fetched_at"?}; gzip allowed."""
    if not path.is_file():
        raise InvalidRequestError("not_found", f"{path} is not a file")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    moment = timestamp(path.stat().st_mtime)
    with opener(path, "rt", encoding="utf-8", errors="replace") as lines:
        try:
            while line := lines.readline(MAX_LINE_CHARS):
                if line.strip():
                    yield _page(line, moment)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            yield Skip("damaged_archive", failed=True)


def _page(line: str, moment: str) -> IndexedPage | Skip:
    try:
        row = cast(dict[str, Any], json.loads(line))
        content = row.get("content") or row["text"]
        url = str(row["url"])
        if url.startswith("http"):
            url = urls.canonical(urls.parse(url))
        return IndexedPage(
            url=url,
            title=str(row.get("title") or url),
            content=str(content),
            fetched_at=str(row.get("fetched_at") or moment),
            language=_text(row.get("language")),
            published=_text(row.get("published")),
            site_name=_text(row.get("site_name")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SearchFetchError):
        return Skip("invalid_line", failed=True)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"wanted text or null, got {type(value).__name__}")
    return value
