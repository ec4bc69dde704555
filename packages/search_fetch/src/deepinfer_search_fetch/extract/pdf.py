"""PDF to Markdown: headings by size, paragraphs, lists, ruled tables; no frames, no hidden text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import ContentError
from deepinfer_search_fetch.extract.hidden import strip_invisible_characters
from deepinfer_search_fetch.extract.inline import escape, escape_line_starts
from deepinfer_search_fetch.extract.pdf_guard import check_streams
from deepinfer_search_fetch.extract.pdf_layout import Line, Table, reading_order
from deepinfer_search_fetch.extract.pdf_page import PageContent, read_page
from deepinfer_search_fetch.extract.textual import TextDocument

MAX_RUNS = 400_000
MAX_TEXT_CHARS = 250_000  # some 70 dense pages: what the time limit of a worker has room for
_MARGIN = 0.1  # of the page's height: where running heads and feet stand
_HEADING_RATIO = 1.15
_MAX_HEADING_CHARS = 200
_MAX_LEVELS = 4
_BULLET = re.compile(r"[•▪‣◦·●■–—-]\s+")  # noqa: RUF001
_NUMBERED = re.compile(r"(\d{1,3})[.)]\s+")
_SENTENCE_END = re.compile(r"""[.!?:;。！？]["'”’)\]]*$""")  # noqa: RUF001
_HYPHENATED = re.compile(r"[^\W\d_](?:[-\u2010]|\xad)$")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")
_NO_TITLE = re.compile(r"(?:untitled|microsoft word\b.*|.*\.(?:docx?|indd|tex|qxd|pdf)|\W*)", re.I)


def extract_pdf(body: bytes, limits: Limits, *, page_marks: bool = False) -> TextDocument:
    """The text of a PDF in reading order. page_marks: `<!-- page n -->` before each page.

    Raises ContentError(feature_unavailable) without pypdfium2, (unsupported_content_type) for a
    damaged or locked file, (extraction_empty) for a scan without text;
    LimitError(decompression_bomb).
    """
    try:
        import pypdfium2
    except ImportError:
        raise ContentError(
            "feature_unavailable",
            "reading PDF needs pypdfium2; pip install './packages/search_fetch[docs]'",
        ) from None
    check_streams(body, limits)
    try:
        document = pypdfium2.PdfDocument(body)
    except pypdfium2.PdfiumError as error:
        raise ContentError(
            "unsupported_content_type", f"the PDF cannot be opened: {error}"
        ) from None
    try:
        warnings: list[str] = []
        pages = list(_pages(document, limits, warnings))
        meta = document.get_metadata_dict()
    finally:
        document.close()
    _warn(pages, warnings)
    running = _running_text(pages)
    for page in pages:
        page.runs = [r for r in page.runs if (_zone(r.y0, r.y1, page), _key(r.text)) not in running]
    writer = _Writer([reading_order(page) for page in pages], page_marks)
    content = writer.write()
    title = meta.get("Title", "").strip()
    return TextDocument(
        content,
        None if _NO_TITLE.fullmatch(title) else title,
        warnings=warnings,
        author=meta.get("Author", "").strip() or None,
        published=_day(meta.get("CreationDate", "")),
        modified=_day(meta.get("ModDate", "")),
    )


def _pages(document: Any, limits: Limits, warnings: list[str]) -> Iterator[PageContent]:
    runs = chars = 0
    for number in range(len(document)):
        if number >= limits.document_pages or runs > MAX_RUNS or chars > MAX_TEXT_CHARS:
            warnings.append(f"pages_truncated:{len(document)}")
            return
        page = document[number]
        try:
            content = read_page(page)
        finally:
            page.close()
        runs += len(content.runs)
        chars += sum(len(run.text) for run in content.runs)
        yield content


def _warn(pages: list[PageContent], warnings: list[str]) -> None:
    hidden = sum(page.hidden_chars for page in pages)
    if hidden:
        warnings.append(f"hidden_text_removed:{hidden}")
    scanned = sum(not page.runs for page in pages)
    if scanned:
        warnings.append(f"no_text_layer:{scanned}")
    if scanned == len(pages):
        raise ContentError(
            "extraction_empty",
            "no page of the PDF has a text layer (a scan?); nothing here reads pictures",
            details={"pages": len(pages), "warnings": warnings},
        )


def _zone(y0: float, y1: float, page: PageContent) -> str:
    if y1 > (1 - _MARGIN) * page.height:
        return "head"
    return "foot" if y0 < _MARGIN * page.height else ""


def _key(text: str) -> str:
    return re.sub(r"\d+", "#", " ".join(text.split())).casefold()


def _running_text(pages: list[PageContent]) -> set[tuple[str, str]]:
    """Heads and feet (numbers counted as equal) that stand on more than half of the pages."""
    if len(pages) < 3:
        return set()
    seen = Counter[tuple[str, str]]()
    for page in pages:
        seen.update({(z, _key(r.text)) for r in page.runs if (z := _zone(r.y0, r.y1, page))})
    return {key for key, count in seen.items() if count > len(pages) / 2}


def _day(value: str) -> str | None:
    match = re.match(r"(?:D:)?(\d{4})(\d{2})(\d{2})", value)
    if match is None or not (match.group(1) >= "1990" and match.group(2) <= "12"):
        return None
    return "-".join(match.groups())


class _Writer:
    """Paragraphs from lines; holds the paragraph that is still open."""

    def __init__(self, pages: list[list[Line | Table]], page_marks: bool) -> None:
        self._pages = pages
        self._marks = page_marks
        self._blocks: list[str] = []
        self._open: list[Line] = []
        sizes = Counter[float]()
        for page in pages:
            for item in page:
                if isinstance(item, Line):
                    sizes[item.size] += len(item.text)
        self._body = sizes.most_common(1)[0][0] if sizes else 0.0
        larger = sorted((s for s in sizes if s >= _HEADING_RATIO * self._body), reverse=True)
        steps: list[float] = []
        for size in larger:
            if not steps or steps[-1] - size > 0.75:
                steps.append(size)
        self._levels = {
            size: min(1 + sum(step - size > 0.75 for step in steps), _MAX_LEVELS) for size in larger
        }

    def write(self) -> str:
        for number, page in enumerate(self._pages, 1):
            if self._marks:
                self._close()
                self._blocks.append(f"<!-- page {number} -->")
            for item in page:
                if isinstance(item, Table):
                    self._close()
                    self._blocks.append(_table(item))
                    continue
                if self._open and self._starts_block(self._open[-1], item):
                    self._close()
                self._open.append(item)
        self._close()
        return "\n\n".join(self._blocks) + "\n" if self._blocks else ""

    def _starts_block(self, before: Line, line: Line) -> bool:
        if abs(before.size - line.size) > 0.15 * before.size:
            return True
        if _BULLET.match(line.text) or _NUMBERED.match(line.text):
            return True
        if line.y0 > before.y0:  # another column or page: the sentence may go on there
            return bool(_SENTENCE_END.search(before.text)) or self._is_heading(line)
        if before.y0 - line.y1 > 0.6 * line.size:
            return True
        indented = line.x0 - before.x0 > 0.8 * line.size
        first = self._open[0]
        widest = max(item.x1 for item in self._open)
        short = widest - before.x1 > 0.25 * (widest - min(item.x0 for item in self._open))
        ended = bool(_SENTENCE_END.search(before.text))
        in_item = bool(_BULLET.match(first.text) or _NUMBERED.match(first.text))
        return ended and ((indented and not in_item) or short)

    def _is_heading(self, line: Line) -> bool:
        return line.size in self._levels

    def _close(self) -> None:
        if not self._open:
            return
        lines, self._open = self._open, []
        text = _join([line.text for line in lines])
        if not text:
            return
        level = self._levels.get(lines[0].size)
        if level and len(text) <= _MAX_HEADING_CHARS and re.search(r"\w", text):
            self._blocks.append(f"{'#' * level} {escape(text)}")
            return
        bullet, number = _BULLET.match(text), _NUMBERED.match(text)
        if bullet:
            self._item("- " + escape(text[bullet.end() :]))
        elif number:
            self._item(f"{number.group(1)}. " + escape(text[number.end() :]))
        else:
            self._blocks.append(escape_line_starts(escape(text)))

    def _item(self, item: str) -> None:
        """List items follow one another without a blank line."""
        last = self._blocks[-1] if self._blocks else ""
        if last[:1] == item[:1] == "-" or (last[:1].isdigit() and item[:1].isdigit()):
            self._blocks[-1] += "\n" + item
        else:
            self._blocks.append(item)


def _join(lines: list[str]) -> str:
    """Lines as one text: broken words joined, no blank between two CJK characters."""
    text = ""
    for line in lines:
        line = strip_invisible_characters(line.replace("\xad", "\0")).replace("\0", "\xad").strip()
        if not text or not line:
            text += line
        elif _HYPHENATED.search(text) and line[0].islower():
            text = text[:-1] + line
        elif _CJK.match(text[-1]) and _CJK.match(line[0]):
            text += line
        else:
            text += " " + line
    return " ".join(text.replace("\xad", "-").split())


def _table(table: Table) -> str:
    rows = [[escape(_join([cell])).replace("|", "\\|") for cell in row] for row in table.rows]
    rule = ["---"] * len(rows[0])
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])
