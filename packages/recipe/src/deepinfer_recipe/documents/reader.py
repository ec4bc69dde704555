"""Documents in requests as text of the prompt: title, then the content between fences.

Text of any kind is shown as it is. PDF needs `pypdf` (the extra `pdf`) and is read in a process
of its own with limits on time and memory: a hostile file costs its limit and an error, no more.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from deepinfer_recipe.base.errors import ConversionError

PDF = "application/pdf"
_TEXT_LIKE = frozenset(
    f"application/{kind}" for kind in ("json", "xml", "yaml", "x-yaml", "toml", "javascript")
)
_BY_SUFFIX = {
    ".pdf": PDF,
    ".txt": "text/plain",
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".csv": "text/csv",
    ".html": "text/html",
    ".json": "application/json",
    ".xml": "application/xml",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".toml": "application/toml",
}
_EXPECTED = "text (text/*, JSON, XML, YAML, TOML)"
_FENCES = re.compile(r"`{3,}")
_READER = Path(__file__).with_name("pdf_reader.py")


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """What the documents of one request may cost.

    max_bytes: size of one document, max_total_bytes: of all; max_total_chars: text of all of them
        in the prompt.
    pdf_cpu_s: processor time for all PDFs together; pdf_timeout_s, pdf_memory_bytes: for one.
    pdf_max_content_bytes: instructions of one PDF's pages, unpacked, before they are read.
    """

    max_documents: int = 20
    max_bytes: int = 16 * 2**20
    max_total_bytes: int = 32 * 2**20
    max_total_chars: int = 4_000_000
    pdf_max_pages: int = 300
    pdf_max_content_bytes: int = 8 * 2**20
    pdf_cpu_s: float = 6.0
    pdf_timeout_s: float = 30.0
    pdf_memory_bytes: int = 768 * 2**20


DEFAULT_LIMITS = DocumentLimits()


def is_data_url(text: str) -> bool:
    """Whether the text is a data URL."""
    return text[:5].lower() == "data:"


def data_url_type(url: str) -> str:
    """The media type that a data URL states, in lower case; empty when it states none."""
    return url[len("data:") :].partition(",")[0].partition(";")[0].strip().lower()


def _type_of(stated: str, title: str | None) -> str:
    if stated and stated != "application/octet-stream":
        return stated
    return _BY_SUFFIX.get(Path(title or "").suffix.lower(), stated or "unknown")


class DocumentReader:
    """Reads the documents of one request, all under the same limits.

    Every error is a `ConversionError` that names the document's place.
    """

    def __init__(self, limits: DocumentLimits) -> None:
        self._limits = limits
        self._documents = 0
        self._bytes = 0
        self._chars = 0
        self._pdf_cpu_s = limits.pdf_cpu_s
        """What is left of it."""

    def from_encoded(self, data: str, title: str | None, place: str, stated: str = "") -> str:
        """A document given as a data URL or as plain base64."""
        if is_data_url(data):
            stated = data_url_type(data) or stated
            head, _, body = data.partition(",")
            if not any(part.strip().lower() == "base64" for part in head.split(";")[1:]):
                self._check_size(len(body) // 3, place)
                raw = unquote_to_bytes(body)
                return self.from_bytes(raw, _type_of(stated, title), title, place)
            data = body
        # Four characters carry three bytes: too much is refused before it is decoded.
        self._check_size(len(data) // 4 * 3, place)
        try:
            raw = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise ConversionError(
                f"{place}: expected a document as base64 or as a data URL", param=place
            ) from None
        return self.from_bytes(raw, _type_of(stated, title), title, place)

    def from_bytes(self, data: bytes, media_type: str, title: str | None, place: str) -> str:
        """A document given as bytes of a media type."""
        self._count(len(data), place)
        media_type = media_type.partition(";")[0].strip().lower()
        if media_type == PDF:
            return self._shown(self._pdf(data, place), title, place)
        if not media_type.startswith("text/") and media_type not in _TEXT_LIKE:
            raise ConversionError(
                f"{place}: documents are {_EXPECTED} or {PDF}, got {media_type[:60]!r}",
                param=place,
            )
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConversionError(
                f"{place}: expected a document in UTF-8, byte {error.start} is not", param=place
            ) from None
        return self._shown(text, title, place)

    def from_text(self, text: str, title: str | None, place: str) -> str:
        """A document given as text."""
        self._count(len(text), place)
        return self._shown(text, title, place)

    def _count(self, size: int, place: str) -> None:
        """Charge a document before anything is done with it."""
        self._check_size(size, place)
        limits = self._limits
        self._documents += 1
        self._bytes += size
        if self._documents > limits.max_documents:
            raise ConversionError(
                f"{place}: a request may have {limits.max_documents} documents", param=place
            )
        if self._bytes > limits.max_total_bytes:
            raise ConversionError(
                f"{place}: the documents of a request may have {limits.max_total_bytes} bytes",
                param=place,
            )

    def _shown(self, text: str, title: str | None, place: str) -> str:
        limits = self._limits
        self._chars += len(text)
        if self._chars > limits.max_total_chars:
            raise ConversionError(
                f"{place}: the documents of a request may have {limits.max_total_chars} characters",
                param=place,
            )
        # Longer than any run in the text, so that no document can end its own fence.
        fence = "`" * max(3, *(len(run) + 1 for run in _FENCES.findall(text)), 3)
        heading = f"{title}\n" if title else ""
        return f"{heading}{fence}\n{text}\n{fence}"

    def _check_size(self, size: int, place: str) -> None:
        if size > self._limits.max_bytes:
            raise ConversionError(
                f"{place}: a document may have {self._limits.max_bytes} bytes", param=place
            )

    def _pdf(self, data: bytes, place: str) -> str:
        limits = self._limits
        if find_spec("pypdf") is None:
            raise ConversionError(
                f"{place}: this server does not read PDF documents (it lacks the extra `pdf`); "
                "send the document as text",
                param=place,
            )
        settings = {
            "max_pages": limits.pdf_max_pages,
            "max_chars": limits.max_total_chars,
            "memory_bytes": limits.pdf_memory_bytes,
            "max_content_bytes": limits.pdf_max_content_bytes,
            "cpu_s": self._pdf_cpu_s,
        }
        if self._pdf_cpu_s <= 0:
            raise self._too_slow(place)
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(_READER), json.dumps(settings)],
                input=data,
                capture_output=True,
                timeout=limits.pdf_timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._pdf_cpu_s = 0.0
            raise ConversionError(
                f"{place}: the PDF could not be read within {limits.pdf_timeout_s:g} s",
                param=place,
            ) from None
        if done.returncode == -signal.SIGPROF:
            self._pdf_cpu_s = 0.0
            raise self._too_slow(place)
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            answer = {"error": "it needs more memory than it may have"}
        self._pdf_cpu_s -= answer.get("cpu_s", 0.0)
        if "error" in answer:
            raise ConversionError(f"{place}: cannot read the PDF: {answer['error']}", param=place)
        return answer["text"]

    def _too_slow(self, place: str) -> ConversionError:
        return ConversionError(
            f"{place}: the PDFs of a request may take {self._limits.pdf_cpu_s:g} s of processor "
            "time, and this takes more; send fewer pages, or the text",
            param=place,
        )
