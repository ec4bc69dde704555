"""Which encoding a body is in, and its text.

Order: byte order mark, HTTP header, XML declaration, <meta charset>, detector, windows-1252. A
source whose decoding leaves more than 1 % replacement characters yields to the next one.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

from deepinfer_search_fetch.models import CharsetSource

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_XML = re.compile(rb"""<\?xml[^>]{0,200}?encoding\s*=\s*["']([A-Za-z0-9_.:\-]{1,40})["']""")
_META = re.compile(rb"""<meta\s[^>]{0,300}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:\-]{1,40})""", re.I)
_HEADER = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9_.:\-]{1,40})""", re.I)
# The standard's names mean the vendor supersets, which Python files under other names.
_PYTHON_NAME = {
    "gbk": "gb18030",
    "gb2312": "gb18030",
    "shift_jis": "cp932",
    "windows-31j": "cp932",
    "euc-kr": "cp949",
    "big5": "big5hkscs",
    "x-mac-cyrillic": "mac-cyrillic",
    "windows-874": "cp874",
    "iso-8859-8-i": "iso-8859-8",
}
_META_WINDOW = 1024
_DETECT_WINDOW = 64 * 1024
_MAX_BAD_SHARE = 0.01
_MAX_MARKS = 30
# C0 controls except tab, line feed, form feed and carriage return.
_DROPPED_CODES = (*range(9), 11, *range(14, 32), 127)
_DROPPED = re.compile("[" + re.escape("".join(map(chr, _DROPPED_CODES))) + "]")
_DROPPED_BYTES = bytes(_DROPPED_CODES)


def decode_text(
    body: bytes, content_type: str | None = None, *, markup: bool = True
) -> tuple[str, str, CharsetSource]:
    """Text (NFC, no NUL or C0 controls), encoding name, and what named it.

    markup: whether <meta charset> and the XML declaration are to be believed.
    """
    fallback: tuple[str, str, CharsetSource] | None = None
    for encoding, source in _claims(body, content_type, markup):
        skip = next((len(b) for b, _ in _BOMS if source == "bom" and body.startswith(b)), 0)
        text = body[skip:].decode(encoding, errors="replace")
        candidate = (text, encoding, source)
        if source == "bom" or text.count("\ufffd") <= _MAX_BAD_SHARE * max(len(text), 1):
            return _clean(text, body, encoding), encoding, source
        fallback = fallback or candidate
    text, encoding, source = fallback or (
        body.decode("windows-1252", "replace"),
        "windows-1252",
        "default",
    )
    return _clean(text, body, encoding), encoding, source


def _claims(
    body: bytes, content_type: str | None, markup: bool
) -> Iterator[tuple[str, CharsetSource]]:
    for bom, name in _BOMS:
        if body.startswith(bom):
            yield name, "bom"
    header = _HEADER.search(content_type or "")
    if header and (name := resolve_label(header.group(1))):
        yield name, "header"
    if markup:
        xml = _XML.search(body[:_META_WINDOW])
        if xml and (name := resolve_label(xml.group(1).decode("ascii"), inside_markup=True)):
            yield name, "xml"
        meta = _META.search(body[:_META_WINDOW])
        if meta and (name := resolve_label(meta.group(1).decode("ascii"), inside_markup=True)):
            yield name, "meta"
    if _is_utf8(body):
        yield "utf-8", "detected"
    elif name := resolve_label(detect_encoding(body[:_DETECT_WINDOW]) or ""):
        yield name, "detected"
    yield "windows-1252", "default"


def resolve_label(label: str, *, inside_markup: bool = False) -> str | None:
    """The Python codec for a WHATWG encoding label, None if the label is unknown."""
    name = map_encoding_to_html5(label.strip().lower(), False)
    if not name:
        return None
    name = _PYTHON_NAME.get(name.lower(), name.lower())
    if inside_markup and name.startswith("utf-16"):
        # A page that could be read far enough to find this label is not UTF-16.
        return "utf-8"
    try:
        return codecs.lookup(name).name
    except LookupError:
        return None


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _clean(text: str, body: bytes, encoding: str) -> str:
    # In UTF-8 a control is a byte, and bytes are searched far faster than text.
    if encoding != "utf-8" or len(body.translate(None, _DROPPED_BYTES)) != len(body):
        text = _DROPPED.sub("", text)
    return unicodedata.normalize("NFC", _stream_safe(text))


def _stream_safe(text: str) -> str:
    """No run of more than 30 combining marks: sorting longer ones takes quadratic time.

    The bound is that of Unicode's stream-safe format; no language comes near it.
    """
    if text.isascii() or not _perhaps_long_runs().search(text):
        return text
    return _long_mark_runs().sub(lambda run: run.group()[:_MAX_MARKS], text)


@lru_cache(maxsize=1)
def _perhaps_long_runs() -> re.Pattern[str]:
    """Finds every long run of marks, and runs of rare scripts: a class of the basic plane and one
    range is a table look-up per character, the exact class is a list of hundreds."""
    marks = "".join(_marks(0x300, 0x10000))
    return re.compile(f"[{marks}\U00010000-\U0001efff]{{{_MAX_MARKS + 1},}}")


@lru_cache(maxsize=1)
def _long_mark_runs() -> re.Pattern[str]:
    return re.compile(f"[{''.join(_marks(0x300, 0x1F000))}]{{{_MAX_MARKS + 1},}}")


def _marks(first: int, end: int) -> list[str]:
    return [c for c in map(chr, range(first, end)) if unicodedata.combining(c)]
