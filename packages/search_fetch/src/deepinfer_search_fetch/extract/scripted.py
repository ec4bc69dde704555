"""Whether a page looks drawn by script: the rule of render=auto."""

from __future__ import annotations

import re

from deepinfer_search_fetch.net.charset import decode_text

MAX_TEXT_CHARS = 200
_SCRIPT_SHARE = 0.8
_SCRIPT = re.compile(r"<script\b", re.I)
_SCRIPT_END = re.compile(r"</script\s*>", re.I)
_ROOT = re.compile(
    r"""<(div|main|app-root|section)\b[^>]{0,300}?\bid\s*=\s*["']?"""
    r"""(?:root|app|__next|__nuxt|main|application|react-root|svelte)\b[^>]{0,300}>\s*</\1>""",
    re.I,
)
_EMPTY_BODY = re.compile(r"<body\b[^>]*>\s*(?:<(?:noscript|script)\b.*)?\s*(?:</body>|$)", re.I)
_NOSCRIPT = re.compile(r"<noscript\b[^>]*>(.{0,2000}?)</noscript", re.I | re.S)
_ASKS = re.compile(r"javascript", re.I)
_WINDOW_CHARS = 2_000_000


def wants_rendering(body: bytes, content_type: str | None, extracted_chars: int) -> bool:
    """Little text was found, and the page's root element is empty, or scripts are more than 80 %
    of it, or its <noscript> asks for JavaScript."""
    if extracted_chars >= MAX_TEXT_CHARS:
        return False
    html = decode_text(body, content_type)[0][:_WINDOW_CHARS]
    plain = _without_scripts(html)
    scripts = len(html) - len(plain)
    if scripts == 0:
        return False
    if _ROOT.search(html) or scripts > _SCRIPT_SHARE * len(html):
        return True
    if _EMPTY_BODY.search(plain):
        return True
    return any(_ASKS.search(match.group(1)) for match in _NOSCRIPT.finditer(plain))


def _without_scripts(html: str) -> str:
    """One pass: a script without an end reaches to the end of the page."""
    pieces: list[str] = []
    done = 0
    while (start := _SCRIPT.search(html, done)) is not None:
        pieces.append(html[done : start.start()])
        end = _SCRIPT_END.search(html, start.end())
        if end is None:
            return "".join(pieces)
        done = end.end()
    return "".join([*pieces, html[done:]])
