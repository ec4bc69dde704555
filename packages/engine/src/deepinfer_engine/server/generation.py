"""One generation, from a prepared request to protocol events. No HTTP in here: the offline batch
and the in-process chat use it as it is."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from deepinfer_engine.codec.errors import Protocol
from deepinfer_engine.codec.protocol import AnswerEncoder, PreparedRequest, WireEvent
from deepinfer_engine.core.types import FinishEvent, GenerateRequest, TokensEvent, Usage
from deepinfer_engine.errors import EngineLost, EngineUnavailable
from deepinfer_engine.router.client import EngineClient
from deepinfer_engine.server.clock import Clock
from deepinfer_engine.server.metrics import Metrics

log = logging.getLogger(__name__)


_ID_PREFIX = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}


@dataclass(slots=True)
class Generation:
    """Run it once with `events`; then `usage`, `ttft_s` and `encoder.body()` tell how it went."""

    engine: EngineClient
    prepared: PreparedRequest
    protocol: Protocol
    metrics: Metrics
    clock: Clock
    salt: str = "anonymous"
    timeout_s: float | None = None
    arrived: float = 0.0
    usage: Usage | None = None
    ttft_s: float | None = None
    response_id: str = ""
    encoder: AnswerEncoder = field(init=False)
    _ended: tuple[str, Usage] = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = self.arrived or self.clock.monotonic()
        self.response_id = self.response_id or _ID_PREFIX[self.protocol] + uuid.uuid4().hex
        self.encoder = self.prepared.encoder(self.response_id)

    async def events(self) -> AsyncGenerator[list[WireEvent], None]:
        """Lists of events, one list per step of the engine, so that a step is one write to the
        socket.

        Closing this generator early closes the engine's iterator, which aborts the request
        everywhere.
        """
        prepared = self.prepared
        request = GenerateRequest(
            # Unique inside the engine whatever X-Request-Id the client repeats.
            request_id=self.response_id,
            token_ids=prepared.token_ids,
            sampling=prepared.sampling,
            salt=self.salt,
            traffic_class=prepared.traffic_class,
            timeout_s=self.timeout_s,
            pictures=prepared.pictures,
        )
        total = Usage(0, 0, 0)
        for turn in itertools.count(1):
            stream = self.engine.generate(request)
            try:
                async with aclosing(self._encode(stream, len(request.token_ids))) as batches:
                    async for batch in batches:
                        yield batch
            finally:
                await _close(stream)
            reason, usage = self._ended
            total = _sum(total, usage)
            if self.encoder.waits:
                out = await self.encoder.run_tools(total.completion_tokens)
                if self.encoder.finished:
                    await self._keep()
                yield out
            if self.encoder.finished:
                self._finished(reason, total)
                return
            following = self.encoder.next_turn()
            request = replace(
                request,
                request_id=f"{self.response_id}-{turn}",
                token_ids=following.token_ids,
                sampling=following.sampling,
                pictures=following.pictures,
            )

    async def _encode(
        self, stream: AsyncIterator[TokensEvent | FinishEvent], prompt_tokens: int
    ) -> AsyncGenerator[list[WireEvent], None]:
        """One turn of the model; `_ended` tells how it went."""
        cached = generated = 0
        is_first = True
        last = self.clock.monotonic()
        itl = self.metrics.itl.labels(self.protocol)
        async for event in stream:
            now = self.clock.monotonic()
            out: list[WireEvent] = []
            if is_first:
                is_first = False
                cached = self._cached_tokens(event)
                out += self.encoder.start(prompt_tokens, cached)
                last = now
                if self.ttft_s is None:
                    self.ttft_s = now - self.arrived
                    self.metrics.ttft.labels(self.protocol).observe(self.ttft_s)
            elif isinstance(event, TokensEvent) and event.token_ids:
                share = (now - last) / len(event.token_ids)
                for _ in event.token_ids:
                    itl.observe(share)
                last = now
            if isinstance(event, FinishEvent):
                if event.reason == "abort" and self.timeout_s is not None:
                    # The engine saw it before the server did.
                    raise TimeoutError(f"the request's own limit of {self.timeout_s:g} s passed")
                out += self.encoder.finish(event.reason)
                self._ended = event.reason, event.usage
                await self._keep()
                yield out
                return
            generated += len(event.token_ids)
            out += self.encoder.tokens(event)
            if self.encoder.finished or self.encoder.waits:
                out += self.encoder.finish("stop")
                self._ended = "stop", Usage(prompt_tokens, generated, cached)
                await self._keep()
                yield out
                return
            yield out
        # A stream that ends without FinishEvent must never look like a complete answer.
        raise EngineLost("the engine's stream ended before the answer did")

    async def _keep(self) -> None:
        """Store the answer before its last event goes out: the client may go on from it at once."""
        if self.encoder.waits or not self.encoder.keeps:
            return
        try:
            await asyncio.to_thread(self.encoder.keep)
        except EngineUnavailable as exc:
            # The answer is whole all the same; who continues it is told that it is not there.
            log.warning("%s is not kept: %s", self.response_id, exc)

    @staticmethod
    def _cached_tokens(event: TokensEvent | FinishEvent) -> int:
        if isinstance(event, FinishEvent):
            return event.usage.cached_tokens
        return event.cached_tokens or 0

    def _finished(self, reason: str, usage: Usage) -> None:
        self.usage = usage
        self.metrics.requests.labels(self.protocol, reason).inc()
        self.metrics.count_usage(usage)
        self.metrics.e2e.labels(self.protocol).observe(self.clock.monotonic() - self.arrived)
        log.info(
            "%s %s %s: %d prompt (%d cached), %d out, first after %.0f ms",
            self.response_id, self.protocol, reason, usage.prompt_tokens, usage.cached_tokens,
            usage.completion_tokens, 1000 * (self.ttft_s or 0.0),
        )  # fmt: skip


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
