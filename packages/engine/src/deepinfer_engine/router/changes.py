"""Waking everybody who waits for the workers to be other than they are."""

from __future__ import annotations

import asyncio


class Changes:
    """Look, and where it is not yet right, `wait` and look again: no change between is missed, for
    nothing else runs between."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Something is different now."""
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def wait(self) -> None:
        """The next change."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)
