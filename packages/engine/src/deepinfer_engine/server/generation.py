"""One generation, from a prepared request to protocol events. No HTTP in here: the offline batch
and the in-process chat use it as it is."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import reduce

from deepinfer_engine.codec.errors import Protocol
from deepinfer_engine.codec.protocol import AnswerEncoder, PreparedRequest, WireEvent
from deepinfer_engine.core.types import (
    FinishEvent,
    GenerateRequest,
    Timings,
    TokensEvent,
    Usage,
)
from deepinfer_engine.errors import EngineLost, EngineUnavailable
from deepinfer_engine.router.client import EngineClient
from deepinfer_engine.server.billing import Answered, Billing
from deepinfer_engine.server.clock import Clock
from deepinfer_engine.server.ledger import Charge
from deepinfer_engine.server.metrics import Metrics

log = logging.getLogger(__name__)


_ID_PREFIX = {
    "chat": "chatcmpl-",
    "responses": "resp_",
    "messages": "msg_",
    "completions": "cmpl-",
}


@dataclass(slots=True)
class Generation:
    """Run it once with `events`; then `usage`, `ttft_s` and `body()` tell how it went.

    A request for several answers runs them side by side, each as a request of the engine's own;
    the prompt they share is computed once where the engine has a cache.
    """

    engine: EngineClient
    prepared: PreparedRequest
    protocol: Protocol
    metrics: Metrics
    clock: Clock
    salt: str = "anonymous"
    timeout_s: float | None = None
    arrived: float = 0.0
    billing: Billing | None = None
    key_id: str = ""
    charge: Charge | None = None
    """What the answer costs, once it is about to end; the caller settles it with the ledger."""
    usage: Usage | None = None
    ttft_s: float | None = None
    finish: str = ""
    """Why the answer ended; set with `usage`."""
    timings: Timings | None = None
    decode_s: float = 0.0
    generated: int = 0
    """Tokens so far, of all turns."""
    response_id: str = ""
    ended: bool = False
    """The last events have been given out; nothing comes behind them."""
    encoders: list[AnswerEncoder] = field(init=False)
    _ended: list[tuple[str, Usage]] = field(init=False)
    _open: set[int] = field(init=False)
    """Answers that are not over."""
    _at: float = field(init=False)
    _body: str | None = None

    def __post_init__(self) -> None:
        self.arrived = self.arrived or self.clock.monotonic()
        self.response_id = self.response_id or _ID_PREFIX[self.protocol] + uuid.uuid4().hex
        self.encoders = list(self.prepared.encoders(self.response_id))
        self._ended = [("", Usage(0, 0, 0))] * len(self.encoders)
        self._open = set(range(len(self.encoders)))
        self._at = 0.0 if self.billing is None else self.billing.wall()

    async def events(self) -> AsyncGenerator[list[WireEvent], None]:
        """Lists of events, one list per step of the engine, so that a step is one write to the
        socket.

        Closing this generator early closes the engine's iterator, which aborts the request
        everywhere.
        """
        answers = [self._answer(index) for index in range(len(self.encoders))]
        async with aclosing(answers[0] if len(answers) == 1 else _merged(answers)) as batches:
            async for batch in batches:
                # Looked at here: while a batch is written, other answers go on.
                if not self._open and not self.ended:
                    if self.billing is not None:
                        batch = await self._settle(self.billing, batch)
                    self.ended = True
                yield batch
        self.count()

    def count(self) -> None:
        """Add a whole answer to the metrics, once. `events` does at its end; whoever stops behind
        the last events does it."""
        if self.usage is None:
            self._finished(self._ended[0][0], self._total())

    def body(self) -> str:
        """The whole response, once `events` is over."""
        return self.encoders[0].body() if self._body is None else self._body

    def _total(self) -> Usage:
        return reduce(_sum, (usage for _, usage in self._ended))

    async def _settle(self, billing: Billing, batch: list[WireEvent]) -> list[WireEvent]:
        """The end of the answer, once it is written down that it goes out."""
        total = self._total()
        answered = Answered(
            id=self.response_id,
            at=self._at,
            key=self.key_id,
            protocol=self.protocol,
            model=self.prepared.model,
            finish=self._ended[0][0],
            # What all answers share is read once.
            counted=replace(self._ended[0][1], completion_tokens=total.completion_tokens),
        )
        self._body = None if self.prepared.stream else self.encoders[0].body()
        # Before it is written: whoever gives up while it is written has to take it back.
        self.charge = billing.charge(answered, batch, self._body)
        try:
            await billing.begin(self.charge)
        except EngineUnavailable:
            self.charge = None
            raise
        if self._body is not None:
            self._body = billing.priced(self._body, self.charge)
        return [WireEvent(e.name, billing.priced(e.data, self.charge)) for e in batch]

    async def _answer(self, index: int) -> AsyncGenerator[list[WireEvent], None]:
        """One of the answers; `_ended[index]` tells how it went."""
        prepared, encoder, part = self.prepared, self.encoders[index], self.prepared.parts[index]
        own_id = self.response_id if len(self.encoders) == 1 else f"{self.response_id}.{index}"
        request = GenerateRequest(
            # Unique inside the engine whatever X-Request-Id the client repeats.
            request_id=own_id,
            token_ids=part.token_ids,
            sampling=part.sampling,
            salt=self.salt,
            traffic_class=prepared.traffic_class,
            timeout_s=self.timeout_s,
            pictures=prepared.pictures,
            prompt_logprobs=part.prompt_logprobs,
        )
        total = Usage(0, 0, 0)
        for turn in itertools.count(1):
            stream = self.engine.generate(request)
            try:
                turn_events = self._encode(index, stream, len(request.token_ids))
                async with aclosing(turn_events) as batches:
                    async for batch in batches:
                        yield batch
            finally:
                await _close(stream)
            reason, usage = self._ended[index]
            total = _sum(total, usage)
            self._ended[index] = reason, total
            if encoder.waits:
                out = await encoder.run_tools(total.completion_tokens)
                if encoder.finished:
                    await self._keep(encoder)
                    self._open.discard(index)
                yield out
            if encoder.finished:
                return
            following = encoder.next_turn()
            request = replace(
                request,
                request_id=f"{own_id}-{turn}",
                token_ids=following.token_ids,
                sampling=following.sampling,
                pictures=following.pictures,
            )

    async def _encode(
        self, index: int, stream: AsyncIterator[TokensEvent | FinishEvent], prompt_tokens: int
    ) -> AsyncGenerator[list[WireEvent], None]:
        """One turn of the model; `_ended[index]` tells how it went."""
        encoder = self.encoders[index]
        cached = generated = 0
        is_first = True
        began = last = self.clock.monotonic()
        itl = self.metrics.itl.labels(self.protocol)
        async for event in stream:
            now = self.clock.monotonic()
            out: list[WireEvent] = []
            if is_first:
                is_first = False
                cached, details = _cache_of(event)
                out += encoder.start(prompt_tokens, cached, details)
                last = now
                if self.ttft_s is None:
                    self.ttft_s = now - self.arrived
                    self.metrics.ttft.labels(self.protocol).observe(self.ttft_s)
            elif isinstance(event, TokensEvent) and event.token_ids:
                itl.observe((now - last) / len(event.token_ids), len(event.token_ids))
                last = now
            if isinstance(event, FinishEvent):
                if event.reason == "abort" and self.timeout_s is not None:
                    # The engine saw it before the server did.
                    raise TimeoutError(f"the request's own limit of {self.timeout_s:g} s passed")
                out += encoder.finish(event.reason)
                self._ended[index] = event.reason, event.usage
                self._stages(event.timings, now - began)
                await self._end(index)
                yield out
                return
            generated += len(event.token_ids)
            self.generated += len(event.token_ids)
            out += encoder.tokens(event)
            if encoder.finished or encoder.waits:
                out += encoder.finish("stop")
                self._ended[index] = "stop", Usage(prompt_tokens, generated, cached)
                await self._end(index)
                yield out
                return
            yield out
        # A stream that ends without FinishEvent must never look like a complete answer.
        raise EngineLost("the engine's stream ended before the answer did")

    def _stages(self, timings: Timings | None, seconds: float) -> None:
        """Of the last turn of an answer, which took so long in the engine."""
        if timings is None:
            return
        before = timings.queued + timings.prefill + timings.transferred
        self.timings, self.decode_s = timings, max(0.0, seconds - before)
        self.metrics.count_stages(self.protocol, timings, self.decode_s)

    async def _end(self, index: int) -> None:
        await self._keep(self.encoders[index])
        if not self.encoders[index].waits:
            self._open.discard(index)

    async def _keep(self, encoder: AnswerEncoder) -> None:
        """Store the answer before its last event goes out: the client may go on from it at once."""
        if encoder.waits or not encoder.keeps:
            return
        try:
            await asyncio.to_thread(encoder.keep)
        except EngineUnavailable as exc:
            # The answer is whole all the same; who continues it is told that it is not there.
            log.warning("%s is not kept: %s", self.response_id, exc)

    def _finished(self, reason: str, usage: Usage) -> None:
        self.usage, self.finish = usage, reason
        self.metrics.requests.labels(self.protocol, reason).inc()
        self.metrics.count_usage(self.protocol, usage)
        self.metrics.e2e.labels(self.protocol).observe(self.clock.monotonic() - self.arrived)
        log.info(
            "%s %s %s: %d prompt (%d cached), %d out, first after %.0f ms",
            self.response_id, self.protocol, reason, usage.prompt_tokens, usage.cached_tokens,
            usage.completion_tokens, 1000 * (self.ttft_s or 0.0),
        )  # fmt: skip


async def _merged(
    answers: Sequence[AsyncGenerator[list[WireEvent], None]],
) -> AsyncGenerator[list[WireEvent], None]:
    """Batches of all answers in the order they were made: the end of the stream comes with the
    last one. However it ends, every answer is closed.
    """
    made: list[tuple[AsyncGenerator[list[WireEvent], None], list[WireEvent] | None]] = []

    async def advance(answer: AsyncGenerator[list[WireEvent], None]) -> None:
        made.append((answer, await anext(answer, None)))

    waiting = {asyncio.ensure_future(advance(answer)) for answer in answers}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            out: list[WireEvent] = []
            for answer, batch in made:
                if batch is not None:
                    out += batch
                    waiting.add(asyncio.ensure_future(advance(answer)))
            made.clear()
            yield out
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        for answer in answers:
            await answer.aclose()


def _cache_of(event: TokensEvent | FinishEvent) -> tuple[int, dict[str, int | str]]:
    """Cached tokens, and where their windows came from, if any were needed."""
    found = event.usage if isinstance(event, FinishEvent) else event
    details: dict[str, int | str] = {}
    if found.window is not None:
        details = {"window": found.window, "replayed_tokens": found.replayed_tokens}
    return found.cached_tokens or 0, details


def _sum(a: Usage, b: Usage) -> Usage:
    return Usage(
        a.prompt_tokens + b.prompt_tokens,
        a.completion_tokens + b.completion_tokens,
        a.cached_tokens + b.cached_tokens,
    )


async def _close(stream: AsyncIterator[TokensEvent | FinishEvent]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
