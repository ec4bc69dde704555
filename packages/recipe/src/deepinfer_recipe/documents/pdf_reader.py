"""Reads a PDF from standard input, in a process of its own that limits itself first.

Writes one JSON object: `{"text": ...}` or `{"error": ...}`. Run by `documents`; it imports nothing
of the package, so that it starts fast.
"""

from __future__ import annotations

import io
import json
import logging
import resource
import sys
from typing import Any


def _limit(settings: dict[str, Any]) -> None:
    memory, seconds = settings["memory_bytes"], settings["cpu_s"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _text(data: bytes, max_pages: int, max_chars: int) -> str:
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        raise ValueError("it is encrypted")
    count = len(reader.pages)
    if count > max_pages:
        raise ValueError(f"it has {count} pages, at most {max_pages} are read")
    texts: list[str] = []
    chars = 0
    for page in reader.pages:
        text = page.extract_text()
        chars += len(text)
        if chars > max_chars:
            raise ValueError(f"it has more than {max_chars} characters")
        texts.append(text.strip())
    text = "\n\n".join(texts).strip()
    if not text:
        raise ValueError("it holds no text (pictures of pages are not read)")
    # Fonts may map glyphs to halves of surrogate pairs.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def main() -> None:
    """Read, answer."""
    settings = json.loads(sys.argv[1])
    logging.disable()
    _limit(settings)
    try:
        data = sys.stdin.buffer.read()
        answer = {"text": _text(data, settings["max_pages"], settings["max_chars"])}
    except MemoryError:
        answer = {"error": "it needs more memory than it may have"}
    except RecursionError:
        answer = {"error": "it is nested too deeply"}
    except Exception as error:
        # The libraries raise whatever a damaged file makes them raise.
        answer = {"error": (str(error) or type(error).__name__)[:200]}
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
