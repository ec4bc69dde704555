"""What stands on one PDF page: runs of visible text with their boxes, and ruled lines."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from typing import Any

MAX_PATHS = 5000
MAX_PATH_SEGMENTS = 2000
_BREAK_GAP = 1.2  # of the font size: a wider gap starts another run (column, table cell)
_TINY_POINTS = 1.0
_INVISIBLE_MODES = (3, 7)  # neither filled nor stroked; clip only
_WHITE = 250
# A word ends after a hyphen that breaks the line: what follows stands on another one.
_WORD = re.compile("[^ \t\r\n\xa0\x02\ufffe]+[\x02\ufffe]?|[\x02\ufffe]")
_IMAGE_COVER = 0.7
_HYPHENS = "\x02\ufffe\xad"  # how PDFium reports a hyphen that only breaks a line


@dataclass(slots=True)
class Run:
    """A piece of one text line. Points, origin at the page's lower left corner."""

    text: str
    x0: float
    y0: float
    x1: float
    y1: float

    @property
    def size(self) -> float:
        return self.y1 - self.y0


@dataclass(slots=True)
class Rule:
    """A straight line at `at` (x of a vertical, y of a horizontal one), from `start` to `end`."""

    at: float
    start: float
    end: float


@dataclass(slots=True)
class PageContent:
    width: float
    height: float
    runs: list[Run] = field(default_factory=list[Run])
    horizontal: list[Rule] = field(default_factory=list[Rule])
    vertical: list[Rule] = field(default_factory=list[Rule])
    hidden_chars: int = 0
    has_image: bool = False


@dataclass(slots=True)
class _Fill:
    box: tuple[float, float, float, float]

    def holds(self, x: float, y: float) -> bool:
        return self.box[0] <= x <= self.box[2] and self.box[1] <= y <= self.box[3]


def read_page(page: Any) -> PageContent:
    """Read a pypdfium2 page. Text that no reader sees (render mode 3 except over a scan, white on
    white, under 1 pt) is counted, not returned."""
    from pypdfium2 import raw

    content = PageContent(*page.get_size())
    fills = _read_objects(raw, page, content)
    text_page = page.get_textpage()
    try:
        _read_text(raw, text_page.raw, content, fills)
    finally:
        text_page.close()
    return content


def _read_objects(raw: Any, page: Any, content: PageContent) -> list[_Fill]:
    """Rules and images of the page; returns the dark areas on which white text can be read."""
    fills: list[_Fill] = []
    area = max(content.width * content.height, 1.0)
    for i in range(min(raw.FPDFPage_CountObjects(page.raw), MAX_PATHS)):
        item = raw.FPDFPage_GetObject(page.raw, i)
        kind = raw.FPDFPageObj_GetType(item)
        if kind not in (raw.FPDF_PAGEOBJ_PATH, raw.FPDF_PAGEOBJ_IMAGE):
            continue
        box = _bounds(raw, item)
        if kind == raw.FPDF_PAGEOBJ_IMAGE:
            covered = (box[2] - box[0]) * (box[3] - box[1]) / area
            content.has_image = content.has_image or covered >= _IMAGE_COVER
            fills.append(_Fill(box))
            continue
        mode, stroke = ctypes.c_int(), ctypes.c_int()
        raw.FPDFPath_GetDrawMode(item, mode, stroke)
        if mode.value and not _is_white(raw, item):
            fills.append(_Fill(box))
        if mode.value or stroke.value:
            _read_rules(raw, item, content)
    return fills


def _bounds(raw: Any, item: Any) -> tuple[float, float, float, float]:
    left, bottom, right, top = (ctypes.c_float() for _ in range(4))
    raw.FPDFPageObj_GetBounds(item, left, bottom, right, top)
    return left.value, bottom.value, right.value, top.value


def _is_white(raw: Any, item: Any) -> bool:
    r, g, b, a = (ctypes.c_uint() for _ in range(4))
    raw.FPDFPageObj_GetFillColor(item, r, g, b, a)
    return a.value < 16 or min(r.value, g.value, b.value) >= _WHITE


def _read_rules(raw: Any, item: Any, content: PageContent) -> None:
    count = raw.FPDFPath_CountSegments(item)
    if not 0 < count <= MAX_PATH_SEGMENTS:
        return
    matrix = raw.FS_MATRIX()
    raw.FPDFPageObj_GetMatrix(item, matrix)
    points: list[tuple[float, float]] = []
    for i in range(count):
        segment = raw.FPDFPath_GetPathSegment(item, i)
        x, y = ctypes.c_float(), ctypes.c_float()
        raw.FPDFPathSegment_GetPoint(segment, x, y)
        point = (
            matrix.a * x.value + matrix.c * y.value + matrix.e,
            matrix.b * x.value + matrix.d * y.value + matrix.f,
        )
        kind = raw.FPDFPathSegment_GetType(segment)
        if kind == raw.FPDF_SEGMENT_MOVETO:
            points = [point]
        elif kind == raw.FPDF_SEGMENT_LINETO and points:
            _add_rule(points[-1], point, content)
            points.append(point)
        else:
            points = []
        if points and raw.FPDFPathSegment_GetClose(segment):
            _add_rule(points[-1], points[0], content)


def _add_rule(a: tuple[float, float], b: tuple[float, float], content: PageContent) -> None:
    if abs(a[1] - b[1]) < 1.0 and abs(a[0] - b[0]) > 8.0:
        content.horizontal.append(Rule((a[1] + b[1]) / 2, min(a[0], b[0]), max(a[0], b[0])))
    elif abs(a[0] - b[0]) < 1.0 and abs(a[1] - b[1]) > 5.0:
        content.vertical.append(Rule((a[0] + b[0]) / 2, min(a[1], b[1]), max(a[1], b[1])))


def _read_text(raw: Any, text_page: Any, content: PageContent, fills: list[_Fill]) -> None:
    """Word by word: PDFium puts blanks where it sees gaps, so a word is one piece."""
    text = _characters(raw, text_page)
    visibility = _Visibility(raw, text_page, content, fills)
    box = raw.FS_RECTF()
    pointer = ctypes.byref(box)
    current: Run | None = None
    position = 0
    for match in _WORD.finditer(text):
        between = text[position : match.start()]
        position = match.end()
        if "\n" in between or "\r" in between:
            current = None
        if not raw.FPDFText_GetLooseCharBox(text_page, match.start(), pointer):
            continue
        x0, y0, x1, y1 = box.left, box.bottom, box.right, box.top
        if not visibility.sees(match.start(), x0, y0, x1, y1):
            content.hidden_chars += len(match.group())
            continue
        if match.end() - match.start() > 1 and raw.FPDFText_GetLooseCharBox(
            text_page, match.end() - 1, pointer
        ):
            x0, x1 = min(x0, box.left), max(x1, box.right)
            y0, y1 = min(y0, box.bottom), max(y1, box.top)
        if current is not None and _continues(current, x0, y0, y1, content.vertical):
            current.text += (" " if between else "") + match.group()
            current.x1 = max(current.x1, x1)
            current.y0, current.y1 = min(current.y0, y0), max(current.y1, y1)
        else:
            current = Run(match.group(), x0, y0, x1, y1)
            content.runs.append(current)
    for run in content.runs:
        # PDFium hands out characters beyond the basic plane as surrogate pairs.
        run.text = run.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        run.text = "".join("\xad" if c in _HYPHENS else c for c in run.text)


def _characters(raw: Any, text_page: Any) -> str:
    """The page's characters, each at its index (one UTF-16 unit each)."""
    count = raw.FPDFText_CountChars(text_page)
    if count <= 0:
        return ""
    buffer = (ctypes.c_ushort * (count + 1))()
    written = raw.FPDFText_GetText(text_page, 0, count, buffer)
    if written == count + 1:
        return "".join(map(chr, buffer[:count]))
    return "".join(chr(raw.FPDFText_GetUnicode(text_page, i)) for i in range(count))


def _continues(run: Run, x0: float, y0: float, y1: float, vertical: list[Rule]) -> bool:
    """Whether a character at x0 belongs to `run`: same line, no wide gap, no ruled line between."""
    overlap = min(run.y1, y1) - max(run.y0, y0)
    height = max(min(run.size, y1 - y0), 0.1)
    gap = x0 - run.x1
    size = max(run.size, 1.0)
    if overlap < 0.5 * height or gap > _BREAK_GAP * size or gap < -2 * size:
        return False
    if gap < 0.1 * size or not vertical:
        return True
    middle = (y0 + y1) / 2
    return not any(run.x1 - 1 <= v.at <= x0 + 1 and v.start <= middle <= v.end for v in vertical)


class _Visibility:
    """Whether words can be seen; what holds for a whole text object is asked for once."""

    def __init__(self, raw: Any, text_page: Any, content: PageContent, fills: list[_Fill]) -> None:
        self._raw = raw
        self._text_page = text_page
        self._content = content
        self._fills = fills
        self._object: int | None = None
        self._painted = self._white = False

    def sees(self, index: int, x0: float, y0: float, x1: float, y1: float) -> bool:
        page = self._content
        if 0 < y1 - y0 < _TINY_POINTS:
            return False
        if x1 < 0 or y1 < 0 or x0 > page.width or y0 > page.height:
            return False
        item = self._raw.FPDFText_GetTextObject(self._text_page, index)
        address = ctypes.cast(item, ctypes.c_void_p).value
        if address is None or address != self._object:
            self._object = address
            self._look_at(item, index)
        if not self._painted:
            return False
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        return not self._white or any(fill.holds(x, y) for fill in self._fills)

    def _look_at(self, item: Any, index: int) -> None:
        raw = self._raw
        self._painted, self._white = True, False
        if item and raw.FPDFTextObj_GetTextRenderMode(item) in _INVISIBLE_MODES:
            # Scans carry their recognised text invisibly over the picture.
            self._painted = self._content.has_image
            return
        r, g, b, a = (ctypes.c_uint() for _ in range(4))
        if raw.FPDFText_GetFillColor(self._text_page, index, r, g, b, a):
            self._painted = a.value >= 16
            self._white = min(r.value, g.value, b.value) >= _WHITE
