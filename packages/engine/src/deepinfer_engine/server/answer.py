"""The life of a generating request, in order: key, rate, declared size, body, a place, prompt,
engine, answer. What costs nothing to check comes before what does.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepinfer_engine.codec.errors import InvalidRequest, Protocol, wire_error
from deepinfer_engine.codec.protocol import PreparedRequest, Tokenising
from deepinfer_engine.core.types import Usage
from deepinfer_engine.errors import ConstraintError
from deepinfer_engine.server.auth import Caller
from deepinfer_engine.server.generation import Generation
from deepinfer_engine.server.limits import check_declared_length, read_body
from deepinfer_engine.server.manners import check_encoding
from deepinfer_engine.server.services import Services
from deepinfer_engine.server.streaming import (
    AnswerWriter,
    ClientGone,
    Timing,
    unless_gone,
    wait_disconnect,
    watch,
)
from deepinfer_engine.server.tracing import Traced

log = logging.getLogger(__name__)

# On a busy machine; two seconds of imports on an idle one.
_COMPILER_START_S = 30.0


class AnswerResponse(Response):
    """A response that is produced while it is sent: the whole request runs in `__call__`, where the
    socket can be watched for a client that leaves, streaming or not."""

    def __init__(self, services: Services, protocol: Protocol, request_id: str) -> None:
        self.services = services
        self.protocol: Protocol = protocol
        self.request_id = request_id
        self.background = None
        self._began = 0.0
        self._prepared_s = 0.0
        self._generation: Generation | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, metrics = self.services, self.services.metrics
        self._began = services.clock.monotonic()
        failed = ""
        writer = AnswerWriter(send, self.protocol, False, services.settings.slow_reader_timeout_s)
        try:
            headers = Headers(scope=scope)
            arrived = services.clock.monotonic()
            caller = services.keys.identify(headers)
            check_encoding(headers)
            services.gate.check_open()
            services.rates.take(caller.key_id)
            writer.headers = services.rates.headers(caller.key_id, self.protocol)
            info = await services.model_info()
            limit = services.body_limit(info.max_model_len)
            check_declared_length(headers.get("content-length"), limit)
            with services.bodies.holding(caller.key_id) as held:
                body = await read_body(receive, limit, held)
                gone = asyncio.ensure_future(wait_disconnect(receive))
                try:
                    with services.gate.enter(caller.key_id), metrics.in_flight.track_inprogress():
                        prepared = await unless_gone(
                            self._prepare(body, caller, info.max_model_len), gone
                        )
                        del body
                        held.let_go()
                        await self._generate(
                            prepared, caller, _timeout(headers), arrived, writer, gone
                        )
                finally:
                    gone.cancel()
            await writer.end()
        except (ClientGone, ClientDisconnect) as exc:
            failed = cause = exc.cause if isinstance(exc, ClientGone) else "disconnect"
            metrics.aborts.labels(self.protocol, cause).inc()
        except Exception as exc:
            if isinstance(exc, TimeoutError):
                metrics.aborts.labels(self.protocol, "deadline").inc()
            failed = await self._fail(exc, writer)
        finally:
            if services.tracing is not None:
                services.tracing.tell(self._traced(failed), Headers(scope=scope))

    async def _prepare(self, body: bytes, caller: Caller, max_model_len: int) -> PreparedRequest:
        codec = self.services.codec

        def prepare(tokenising: Tokenising | None) -> PreparedRequest:
            return codec.prepare(
                self.protocol, body, max_model_len, owner=caller.owner, tokenising=tokenising
            )

        reads_store = self.protocol == "responses" and codec.kept_responses is not None
        return await self.services.off_loop(
            prepare, size=len(body), caller=caller.key_id, blocks=reads_store
        )

    async def _generate(
        self,
        prepared: PreparedRequest,
        caller: Caller,
        timeout_s: float | None,
        arrived: float,
        writer: AnswerWriter,
        gone: asyncio.Future[None],
    ) -> None:
        services = self.services
        if not services.settings.priorities and any(
            part.sampling.priority < 0 for part in prepared.parts
        ):
            raise InvalidRequest(
                "priority: requests may step back here (above 0), not forward; the operator allows "
                "it with --priorities",
                param="priority",
            )
        writer.stream = prepared.stream
        writer.headers |= _warning(prepared)
        services.metrics.count_ignored(self.protocol, len(prepared.warnings), prepared.unenforced)
        services.rates.charge(caller.key_id, sum(len(p.token_ids) for p in prepared.parts))
        generation = Generation(
            engine=services.engine,
            prepared=prepared,
            protocol=self.protocol,
            metrics=services.metrics,
            clock=services.clock,
            salt=caller.salt(prepared.user_id),
            timeout_s=timeout_s,
            arrived=arrived,
            billing=services.billing,
            key_id=caller.key_id or "",
        )
        self._generation = generation
        self._prepared_s = services.clock.monotonic() - self._began
        pixels = sum(len(p.pixels) for p in prepared.pictures)
        try:
            with services.pixels.holding(caller.key_id, pixels):
                await self._answer(generation, writer, gone)
        finally:
            services.rates.charge(caller.key_id, generation.generated)

    async def _answer(
        self, generation: Generation, writer: AnswerWriter, gone: asyncio.Future[None]
    ) -> None:
        settings = self.services.settings
        silence_first = settings.first_byte_s if writer.stream else settings.keepalive_s
        if generation.prepared.parts[0].sampling.constraint is not None:
            # A schema may be refused after all the time it may take, and with a status of its own;
            # its compiler may have to start before.
            silence_first += settings.xgrammar_timeout + _COMPILER_START_S
        timing = Timing(
            silence_first=silence_first,
            silence=settings.keepalive_s,
            first_token=settings.first_token_timeout_s,
            between_tokens=settings.token_timeout_s,
            slow_reader=settings.slow_reader_timeout_s,
            total=generation.timeout_s,
        )
        ending = asyncio.ensure_future(self.services.gate.ending())
        sent = False
        try:
            watched = watch(generation.events(), gone, ending, self.services.clock, timing)
            async with aclosing(watched) as batches:
                async for batch in batches:
                    if batch is None:
                        await writer.keepalive()
                        continue
                    await writer.events(batch)
                    if writer.stream and generation.ended:
                        # The client has all of it, and may leave now: that is no abort.
                        break
            if not writer.stream:
                await writer.whole(generation.body())
            sent = True
            generation.count()
        except ConstraintError as exc:
            # A worker knows the grammar, not the field that it came from.
            exc.param = exc.param or generation.prepared.constraint_param
            raise
        finally:
            ending.cancel()
            if generation.charge is not None and self.services.billing is not None:
                self.services.billing.end(generation.charge, sent=sent)

    def _traced(self, failed: str) -> Traced:
        generation = self._generation
        duration = self.services.clock.monotonic() - self._began
        if generation is None:
            return Traced(
                self.protocol, self.request_id, "", duration, self._prepared_s, error=failed
            )
        stages: list[tuple[str, float]] = []
        if (timings := generation.timings) is not None:
            stages = [("queue", timings.queued), ("prefill", timings.prefill)]
            stages += [("transfer", timings.transferred)] if timings.transferred else []
            stages.append(("decode", generation.decode_s))
        usage = generation.usage or Usage(0, generation.generated, 0)
        return Traced(
            protocol=self.protocol,
            request_id=self.request_id,
            response_id=generation.response_id,
            duration=duration,
            prepared=self._prepared_s,
            stages=tuple(stages),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            finish=generation.finish,
            error=failed,
        )

    async def _fail(self, exc: Exception, writer: AnswerWriter) -> str:
        """Tell it; the error's code."""
        error = wire_error(exc, self.protocol, self.request_id)
        self.services.metrics.errors.labels(self.protocol, error.code).inc()
        if error.status == 500:
            log.error("request %s failed", self.request_id, exc_info=exc)
        try:
            await writer.error(error)
            await writer.end()
        except ClientGone:
            log.debug("request %s: the client left before its error", self.request_id)
        return error.code


def _warning(prepared: PreparedRequest) -> dict[str, str]:
    """A header that names what the request asked for and does not get."""
    texts: list[str] = []
    if prepared.warnings:
        # Names come from the client: only what a header may hold, and not much of it.
        names = [re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", n)[:64] for n in prepared.warnings[:16]]
        texts.append(f'299 deepinfer "ignored: {", ".join(names)}"')
    if prepared.unenforced:
        texts.append('299 deepinfer "tools: calls are not held to their schemas"')
    return {"warning": ", ".join(texts)} if texts else {}


def _timeout(headers: Headers) -> float | None:
    text = headers.get("x-request-timeout-ms")
    if text is None:
        return None
    # Eight digits are enough; Python refuses to read an int of thousands.
    if not re.fullmatch("[0-9]{1,8}", text) or not 0 < int(text) <= 86_400_000:
        raise InvalidRequest(
            f"x-request-timeout-ms must be 1 to 86400000, got {text[:40]!r}",
            param="x-request-timeout-ms",
        )
    return int(text) / 1000
