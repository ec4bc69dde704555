"""What the fetch pipeline wants from a renderer, and when it wants one."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from deepinfer_search_fetch.urls import Url

MAX_TEXT_CHARS = 200
_SCRIPT_SHARE = 0.8
_SCRIPT = re.compile(r"<script\b[^>]*>.*?</script\s*>", re.I | re.S)
_ROOT = re.compile(
    r"""<(div|main|app-root|section)\b[^>]{0,300}?\bid\s*=\s*["']?"""
    r"""(?:root|app|__next|__nuxt|main|application|react-root|svelte)\b[^>]{0,300}>\s*</\1>""",
    re.I,
)
_EMPTY_BODY = re.compile(r"<body\b[^>]*>\s*(?:<(?:noscript|script)\b.*)?\s*(?:</body>|$)", re.I)
_NOSCRIPT = re.compile(r"<noscript\b[^>]*>(.{0,2000}?)</noscript", re.I | re.S)
_ASKS = re.compile(r"javascript", re.I)


@dataclass(frozen=True, slots=True)
class RenderJob:
    """One page to render.

    html: the text that was already fetched from `url`; the browser gets it instead of asking the
    site again. wait_for: CSS selector to wait for, milliseconds to wait, or None. gate: called
    before the page may navigate elsewhere; raises to stop it. seconds: limit of the whole job.
    """

    url: Url
    html: str
    gate: Callable[[Url], Awaitable[None]]
    seconds: float
    wait_for: str | int | None = None
    accept_language: str | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """The page as it stood when it came to rest; html has shadow roots and frames flattened."""

    html: str
    url: Url
    status: int
    warnings: tuple[str, ...]


class Renderer(Protocol):
    """Anything that can run a page."""

    def problem(self) -> str | None:
        """Why rendering is not possible here, None if it is."""
        ...

    async def render(self, job: RenderJob) -> Rendered:
        """Raises SearchFetchError."""
        ...

    async def close(self) -> None: ...


def wants_rendering(html: str, extracted_chars: int) -> bool:
    """The rule of render=auto: little text was found, and the page looks drawn by script.

    That is: its root element is empty, or scripts are more than 80 % of it, or its <noscript> asks
    for JavaScript.
    """
    if extracted_chars >= MAX_TEXT_CHARS:
        return False
    scripts = sum(len(match.group()) for match in _SCRIPT.finditer(html))
    if scripts == 0:
        return False
    if _ROOT.search(html) or scripts > _SCRIPT_SHARE * len(html):
        return True
    plain = _SCRIPT.sub("", html)
    if _EMPTY_BODY.search(plain):
        return True
    return any(_ASKS.search(match.group(1)) for match in _NOSCRIPT.finditer(plain))
