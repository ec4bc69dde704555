"""What the fetch pipeline wants from a renderer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from deepinfer_search_fetch.urls import Url


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
