"""`LocalEngine`: prefill and decode on one runner inside this process, without sockets."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.grammars import GrammarCompiler
from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.loops import engine_loop
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.prefix_store import PrefixStore
from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.core.types import (
    FinishEvent,
    GenerateEvent,
    GenerateRequest,
    Timings,
    TokensEvent,
)
from deepinfer_engine.errors import EngineLost, EngineUnavailable, RequestError
from deepinfer_engine.kv.connector import KVConnector
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.pd.compiling import FairCompiler
from deepinfer_engine.pd.mailbox import Mailbox
from deepinfer_engine.pd.step_thread import StepThread
from deepinfer_engine.router.client import ModelInfo, WorkerStatus


@dataclass(slots=True)
class _Stream:
    """Where the events of one request go: a queue on the event loop that asked."""

    mailbox: Mailbox
    queue: asyncio.Queue[Progress]

    def post(self, progress: Progress) -> None:
        self.mailbox.post(self.queue.put_nowait, progress)


class LocalEngine:
    """EngineClient on one runner in this process: prefill and decode, steps in their own thread.

    The engine owns the store and the grammar compiler and closes them. Usable from several event
    loops.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        store: PrefixStore | None = None,
        config: EngineConfig | None = None,
        grammars: GrammarCompiler | None = None,
        name: str = "local",
        make_loop: Callable[..., EngineLoop] = engine_loop,
    ) -> None:
        """make_loop: called as `engine_loop`."""
        self._grammars = grammars
        self._compiler = FairCompiler(grammars)
        self._runner = runner
        self._name = name
        config = config or EngineConfig()
        self._connector = (
            None
            if store is None
            else KVConnector(store, runner, persist_state=config.persist_state)
        )
        self._streams: dict[str, _Stream] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self.loop = make_loop(
            runner,
            config,
            "both",
            parking=HostParking(runner, config.park_bytes),
            link=self._connector,
            sink=self,
        )
        self._thread = StepThread(self.loop, failed=self._fail)
        self._thread.start()

    # -- EngineClient ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """See `EngineClient.generate`."""
        if self._failure is not None or self._closed:
            raise EngineUnavailable(f"engine {self._name} has stopped: {self._failure or 'closed'}")
        key = request.request_id
        if key in self._streams:
            raise RequestError(f"request {key} runs already; every request needs its own id")
        events = asyncio.get_running_loop()
        for closed in [e for e in self._mailboxes if e.is_closed()]:
            del self._mailboxes[closed]
        mailbox = self._mailboxes.setdefault(events, Mailbox(events))
        stream = self._streams[key] = _Stream(mailbox, asyncio.Queue())
        timer = None
        started = time.monotonic()
        first_s = 0.0
        try:
            constraint = None
            if request.sampling.constraint is not None:
                constraint = await self._compiler.compiled(request.sampling, request.salt)
            self.loop.submit(request, key, started, constraint)
            if request.timeout_s is not None:
                left = max(0.0, request.timeout_s - (time.monotonic() - started))
                timer = events.call_later(left, self.loop.abort, key)
            while True:
                progress = await stream.queue.get()
                if progress.finish == "error" and (self._failure is not None or self._closed):
                    raise EngineLost(f"the engine failed while the request ran: {self._failure}")
                if progress.tokens:
                    event = TokensEvent(progress.index, progress.tokens, progress.logprobs)
                    if progress.index == 0:
                        first_s = time.monotonic() - started
                        found = progress.seq.cached
                        event = replace(
                            event,
                            cached_tokens=found.n_tokens,
                            replayed_tokens=found.replayed,
                            window=found.window,
                            prompt_logprobs=tuple(progress.seq.prompt_logprobs),
                        )
                    yield event
                if progress.finish is not None:
                    queued = progress.seq.queued_s
                    timings = Timings(queued, max(0.0, first_s - queued))
                    yield FinishEvent(progress.finish, progress.seq.usage(), timings)
                    return
        finally:
            if timer is not None:
                timer.cancel()
            del self._streams[key]
            self.loop.abort(key)

    async def model_info(self) -> ModelInfo:
        caps = self._runner.caps
        return ModelInfo(
            caps.max_model_len, caps.vocab_size, caps.nextn, self._runner.layout.layout_hash
        )

    async def status(self) -> list[WorkerStatus]:
        counters, gauges = self.loop.snapshot()
        if self._connector is not None:
            counters |= self._connector.counters()
            gauges |= self._connector.gauges()
        if self._grammars is not None:
            counters |= self._grammars.counters()
            gauges |= self._grammars.gauges()
        gauges["last_step_seconds"] = self._thread.last_step_s
        failed = self._failure is not None or self._closed
        stuck = self._thread.trouble
        own = WorkerStatus(
            name=self._name,
            role="single",
            ready=not failed and not stuck,
            detail=f"stopped: {self._failure or 'closed'}" if failed else stuck,
            pid=os.getpid(),
            counters=counters,
            gauges=gauges,
        )
        # What one of them lacks, all lack: they step together.
        others = [
            replace(
                own,
                name=f"{self._name}-{rank}",
                pid=other.pid,
                counters=other.counters,
                gauges=other.gauges,
            )
            for rank, other in enumerate(self.loop.others, start=1)
        ]
        return [own, *others]

    async def problems(self) -> list[str]:
        return []

    async def flush(self) -> None:
        if self._connector is not None:
            await asyncio.to_thread(self._connector.flush)

    async def close(self) -> None:
        """Stop after the step in flight; requests still running raise EngineLost."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._thread.stop)
        self.loop.abort_all("error")
        if self._connector is not None:
            await asyncio.to_thread(self._connector.close)
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)

    # -- Sink, from the step thread -------------------------------------------------------------

    def chunk_done(self, chunk: Chunk) -> None:
        """Prefill and decode share their memory here: nothing has to be sent."""

    def progress(self, progress: Progress) -> None:
        stream = self._streams.get(progress.seq.key)
        if stream is None:
            return
        if progress.finish in ("stop", "length") and self._connector is not None:
            # The next turn may come at once, and must find what this one published.
            self._connector.after_publications(lambda: stream.post(progress))
        else:
            stream.post(progress)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
