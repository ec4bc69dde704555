"""What every route works with: one value, made by `create_app`, kept in `app.state.services`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from deepinfer_engine.codec.errors import Protocol
from deepinfer_engine.codec.protocol import Codec, Tokenising
from deepinfer_engine.router.client import EngineClient, ModelInfo
from deepinfer_engine.server.auth import AdminGate, KeyRing
from deepinfer_engine.server.billing import Billing
from deepinfer_engine.server.clock import Clock
from deepinfer_engine.server.compat_metrics import CompatCollector
from deepinfer_engine.server.connections import ConnectionTable
from deepinfer_engine.server.history import History
from deepinfer_engine.server.limits import BodyLimit, ByteBudget, FairSlots, Gate, Rates
from deepinfer_engine.server.metrics import Metrics
from deepinfer_engine.server.tokenising import LONG_CHARACTERS, Job, TokeniserProcesses
from deepinfer_engine.server.tracing import Tracing
from deepinfer_engine.settings import Settings

INLINE_BYTES = 32 * 1024
THREADS = 8
"""Few: each may hold the decoded pictures of one request."""

TOKENISERS = 2

T = TypeVar("T")


@dataclass(slots=True)
class Services:
    """The engine behind the routes, and the policies in front of it. Wall time is for `created`
    alone.
    """

    engine: EngineClient
    codec: Codec
    settings: Settings
    keys: KeyRing
    admin: AdminGate
    gate: Gate
    metrics: Metrics
    clock: Clock
    wall: Callable[[], float]
    pixels: ByteBudget
    bodies: ByteBudget
    rates: Rates
    connections: ConnectionTable
    tokenisers: TokeniserProcesses | None
    """None: the codec's tokenizer is in no file, so long texts are tokenised in a thread."""
    compat: CompatCollector | None = None
    """Names of other servers' metrics, where they were asked for."""
    tracing: Tracing | None = None
    billing: Billing | None = None
    """None: nothing is priced or written down."""
    history: History = field(default_factory=History)
    private: bool = True
    """Only this machine reaches the server: who asks for metrics need not show a key."""
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS + TOKENISERS, "prepare")
    )
    slots: FairSlots = field(default_factory=lambda: FairSlots(THREADS))
    """Turns at the threads."""

    async def model_info(self) -> ModelInfo:
        """Of the workers that are there now: one may have been replaced by one with another
        context. Raises EngineUnavailable while there is none."""
        return await self.engine.model_info()

    def body_limit(self, max_model_len: int) -> BodyLimit:
        """How long a body of a request to this model may be."""
        size = self.settings.max_body_bytes
        fits = self.codec.body_bytes(max_model_len)
        return BodyLimit(size) if fits is None or fits >= size else BodyLimit(fits, max_model_len)

    async def off_loop(
        self,
        call: Callable[[Tokenising | None], T],
        *,
        size: int,
        caller: str | None,
        blocks: bool = False,
    ) -> T:
        """`call(tokenising)` of the codec for a body of `size` bytes, where it holds nobody up.

        A short one at once, a longer one in a thread, a long one with a tokenizer in a process of
        its own. Cancelled, it waits until nothing works for it any more. Threads and processes go
        round by key. blocks: may wait for something else than the processor.
        """
        if size <= INLINE_BYTES and not (blocks or self.codec.blocks):
            return call(None)
        if size <= LONG_CHARACTERS or self.tokenisers is None:
            async with self.slots.hold(caller):
                return await self._in_thread(call, None)
        async with self.tokenisers.job(caller) as job:
            return await self._in_thread(call, job)

    async def _in_thread(self, call: Callable[[Tokenising | None], T], job: Job | None) -> T:
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self.threads, partial(call, job))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if job is not None:
                job.close()
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # nobody waits for it any more
            raise

    def check_details(self, headers: Mapping[str, str]) -> None:
        """Raises AuthenticationFailed where metrics and details are for callers with a key."""
        if not self.private and not self.admin.admits(headers):
            self.keys.identify(headers)

    def close(self) -> None:
        """End the processes and threads that prepare requests, and let go of the ledger."""
        if self.tokenisers is not None:
            self.tokenisers.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()
        if self.billing is not None and self.billing.ledger is not None:
            self.billing.ledger.close()


def services_of(request: Request) -> Services:
    """The services of the application that got this request."""
    return request.app.state.services


def protocol_of(path: str, headers: object) -> Protocol:
    """In which protocol's shape an error is told when no route knows better."""
    has_header = "anthropic-version" in headers  # type: ignore[operator]  # any header mapping
    return "messages" if "/messages" in path or has_header else "chat"
