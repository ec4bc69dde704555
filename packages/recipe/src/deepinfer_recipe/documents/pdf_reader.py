"""Reads a PDF from standard input, in a process of its own that limits itself first.

Writes one JSON object: `{"text": ...}` or `{"error": ...}`. Run by `documents`; it imports nothing
of the package, so that it starts fast.
"""

from __future__ import annotations

import io
import json
import logging
import resource
import signal
import sys
import time
from typing import Any


def _limit(settings: dict[str, Any]) -> None:
    memory, seconds = settings["memory_bytes"], settings["cpu_s"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # The timer counts this process's own time in fractions of a second, and its signal ends it;
    # the limit behind it holds if a library should catch the signal.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    whole = int(seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _content_bytes(page: Any) -> int:
    """Size of a page's instructions, unpacked; what it draws besides is left to the timer."""
    contents = page.get_contents()
    return 0 if contents is None else len(contents.get_data())


def _text(data: bytes, settings: dict[str, Any]) -> str:
    from pypdf import PdfReader

    max_pages, max_chars = settings["max_pages"], settings["max_chars"]
    content_left = settings["max_content_bytes"]
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted:
        raise ValueError("it is encrypted")
    count = len(reader.pages)
    if count > max_pages:
        raise ValueError(f"it has {count} pages, at most {max_pages} are read")
    texts: list[str] = []
    chars = 0
    for page in reader.pages:
        content_left -= _content_bytes(page)
        if content_left < 0:
            raise ValueError(f"its pages hold over {settings['max_content_bytes']} bytes, unpacked")
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
        answer: dict[str, Any] = {"text": _text(data, settings)}
    except MemoryError:
        answer = {"error": "it needs more memory than it may have"}
    except RecursionError:
        answer = {"error": "it is nested too deeply"}
    except Exception as error:
        # The libraries raise whatever a damaged file makes them raise.
        answer = {"error": (str(error) or type(error).__name__)[:200]}
    answer["cpu_s"] = time.process_time()
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
