"""Turns at the grammar compiler, by who asks: one key's costly schemas hold nobody else up."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from deepinfer_engine.core.constraint import ConstraintState
from deepinfer_engine.core.grammars import GrammarCompiler, constraint_of
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import EngineUnavailable

RUNNING_PER_KEY = 1
WAITING_PER_KEY = 16


class FairCompiler:
    """`constraint_of`, one grammar of each key at a time; the others of that key wait here.

    A compiler has two processes: while one of them is busy with what this key sent, the other is
    there for the rest. Who waits and goes, leaves the queue; a compile that the last of its
    requests has left is killed.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._wanted: Counter[str] = Counter()
        """How many requests wait for a text."""

    async def compiled(self, sampling: SamplingParams, salt: str) -> ConstraintState | None:
        """See `constraint_of`; also EngineUnavailable when too many of this key wait."""
        key = salt.partition("/")[0]
        if self._running[key] >= RUNNING_PER_KEY:
            await self._turn(key)
        else:
            self._running[key] += 1
        text = "" if sampling.constraint is None else sampling.constraint.grammar
        self._wanted[text] += 1
        try:
            return await constraint_of(sampling, self._compiler)
        finally:
            self._wanted[text] -= 1
            if not self._wanted[text]:
                del self._wanted[text]
                if self._compiler is not None:
                    # Left by the last who wanted it, it is killed; a finished one is not touched.
                    self._compiler.abandon(text)
            self._pass_on(key)

    async def _turn(self, key: str) -> None:
        queue = self._waiting.setdefault(key, deque())
        if len(queue) >= WAITING_PER_KEY:
            raise EngineUnavailable(
                f"{len(queue)} schemas of this key wait to be compiled; send it again later"
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._pass_on(key)
            raise

    def _pass_on(self, key: str) -> None:
        """The turn goes to the next of this key, if one still waits."""
        queue = self._waiting.get(key)
        while queue:
            place = queue.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._waiting.pop(key, None)
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
