"""One attempt at a request: reserve on decode, prefill, then the stream without gaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass

from deepinfer_engine.core.types import (
    FinishEvent,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Timings,
    TokenLogprob,
    TokensEvent,
    Usage,
)
from deepinfer_engine.core.windows import NOTHING
from deepinfer_engine.errors import (
    CapacityError,
    ConstraintError,
    ConstraintsUnavailable,
    EngineError,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
    SchemaTooComplex,
    TransferError,
)
from deepinfer_engine.pd.messages import (
    pack_tokens,
    pixel_pieces,
    read_cached,
    read_logprobs,
    read_usage,
    reading,
    request_body,
    unpack_tokens,
    xid_body,
)
from deepinfer_engine.pd.peers import abort_body
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.wire import Body, FrameType, Xid
from deepinfer_engine.router.link import Mail, Mailbox, WorkerLink
from deepinfer_engine.router.work import Task


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: WorkerLink
    decode: WorkerLink
    cost_ms: float = 0.0
    """Predicted work of the prefill worker."""
    encoders: tuple[tuple[str, int], ...] = ()
    """Address and epoch of encode workers that fit the prefill worker."""


class Retry(Exception):  # noqa: N818 - a signal inside the router, not an error of the package
    """Another attempt may succeed where this one stands; `final` is raised when none is left.

    failed: the worker to avoid where there is another; `refused`: it said no, do not ask it again.
    told_by: the one that says so of the other; avoided too, for the fault may lie between them.
    planned: nobody failed: the worker is being emptied.
    starved: nobody failed but encode workers: `failed` could ask none.
    """

    def __init__(
        self,
        final: EngineError,
        failed: WorkerLink,
        *,
        refused: bool = False,
        planned: bool = False,
        starved: bool = False,
    ) -> None:
        super().__init__(str(final))
        self.final = final
        self.failed = failed
        self.told_by = failed
        self.refused = refused
        self.planned = planned
        self.starved = starved


async def run_attempt(
    request: GenerateRequest, xid: Xid, placement: Placement, deadline: float | None
) -> AsyncGenerator[GenerateEvent]:
    """Events of one attempt. Left early or by an error, it aborts both workers."""
    attempt = _Attempt(request, xid, placement, deadline)
    tokens = float(len(request.token_ids))
    with ExitStack() as stack:
        stack.enter_context(placement.prefill.stream(xid, attempt.mailbox, tokens))
        stack.enter_context(placement.decode.stream(xid, attempt.mailbox, tokens))
        attempt.task = placement.prefill.work.begin(placement.cost_ms)
        stack.callback(attempt.task.end)
        try:
            async for event in attempt.events():
                yield event
        finally:
            attempt.leave()


class _Attempt:
    def __init__(
        self, request: GenerateRequest, xid: Xid, placement: Placement, deadline: float | None
    ) -> None:
        self.request = request
        self.xid = xid
        self.prefill, self.decode = placement.prefill, placement.decode
        if self.prefill.info is None or self.decode.info is None:
            raise RuntimeError("a request was placed on a worker that was never connected")
        self.prefill_info, self.decode_info = self.prefill.info, self.decode.info
        self.encoders = placement.encoders
        self.deadline = deadline
        self.mailbox: Mailbox = asyncio.Queue()
        self.task: Task | None = None
        """What the prefill worker still has to do for this."""
        self.emitted = request.resumed
        self.started = False
        self.prefix = NOTHING
        self._prompt: list[TokenLogprob] = []
        self._behind_first = {FrameType.TOKENS}
        if request.prompt_logprobs is not None:
            self._behind_first.add(FrameType.READY)  # what is said of the prompt comes from prefill
        self.decode_done = False
        self.prefill_done = False
        self._began = time.monotonic()
        self._reserved = self._began
        self._first_at: float | None = None
        self._ready_at: float | None = None

    async def events(self) -> AsyncGenerator[GenerateEvent]:
        try:
            async with asyncio.timeout_at(self.deadline):
                grant = await self._reserve()
                await self._send_prefill(grant)
        except TimeoutError:
            yield FinishEvent("abort", self._usage())
            return
        held: list[Mail] = []
        while True:
            try:
                if self.deadline is None:
                    mail = await self._next()
                else:
                    async with asyncio.timeout_at(self.deadline):
                        mail = await self._next()
            except TimeoutError:
                yield FinishEvent("abort", self._usage())
                return
            if mail.kind in self._behind_first and not self.started:
                held.append(mail)  # decode may be heard before prefill's first token is
                continue
            for one in [mail, *held]:
                if one is not mail and not self.started:
                    break
                try:
                    events = reading(lambda _, one=one: self._read(one), one.body)
                except TransferError as error:
                    raise self._lost(one.link, f"broke the protocol: {error}") from None
                for event in events:
                    yield event
                    if isinstance(event, FinishEvent):
                        return
            if self.started:
                held.clear()

    async def _reserve(self) -> int:
        self.decode.send(
            FrameType.RESERVE,
            {
                **xid_body(self.xid),
                **request_body(self.request),
                "prompt_len": len(self.request.token_ids),
                "layout_hash": self.prefill_info.layout_hash,
                "epoch": self.decode_info.epoch,
            },
        )
        while True:
            mail = await self._next()
            if mail.kind is FrameType.RESERVED:
                self._reserved = time.monotonic()
                return reading(lambda b: int(b["grant_id"]), mail.body)

    async def _send_prefill(self, grant: int) -> None:
        for piece in pixel_pieces(self.request):
            self.prefill.send(FrameType.PIXELS, {**xid_body(self.xid), "data": piece})
            await self.prefill.drain()
        self.prefill.send(
            FrameType.PREFILL,
            {
                **xid_body(self.xid),
                **request_body(self.request),
                "tokens": pack_tokens(self.request.token_ids),
                "epoch": self.prefill_info.epoch,
                "decode_address": self.decode.address,
                "decode_epoch": self.decode_info.epoch,
                "grant_id": grant,
                "encoders": self.encoders,
                "prompt_logprobs": self.request.prompt_logprobs,
            },
        )

    async def _next(self) -> Mail:
        """The next message that is not about losing a worker; those raise."""
        while True:
            mail = await self.mailbox.get()
            body = mail.body
            match mail.kind:
                case None:
                    if mail.link is self.prefill and self.prefill_done:
                        continue
                    raise self._lost(mail.link, "went away")
                case "move":
                    raise self._leaves(mail.link)
                case FrameType.STALE_EPOCH:
                    raise self._lost(mail.link, "was restarted")
                case FrameType.BUSY:
                    seconds = float(body.get("retry_after_ms", 1000)) / 1000
                    busy = EngineUnavailable(
                        f"decode worker {mail.link.address} is {body.get('reason')}", seconds
                    )
                    self.decode_done = True
                    planned = body.get("reason") == "draining"
                    raise Retry(busy, mail.link, refused=True, planned=planned)
                case FrameType.ABORT:
                    if mail.link is self.decode:
                        self.decode_done = True
                    else:
                        self.prefill_done = True
                    raise self._aborted(mail)
                case _:
                    return mail

    def _read(self, mail: Mail) -> list[GenerateEvent]:
        body = mail.body
        match mail.kind:
            case FrameType.PROMPT_LOGPROBS:
                self._prompt += reading(lambda b: read_logprobs(b["logprobs"]), body)
                return []
            case FrameType.FIRST:
                self._first_at = self._first_at or time.monotonic()
                return self._first(body, unpack_tokens(body["tokens"]))
            case FrameType.READY:
                # Decode has everything and repeats the first token: prefill is not needed any more.
                self.prefill_done = True
                self._ready_at = time.monotonic()
                self._first_at = self._first_at or self._ready_at
                return self._first(body, (int(body["token"]),))
            case FrameType.TOKENS:
                return self._tokens(body)
            case _:
                return []

    def _first(self, body: Body, tokens: tuple[int, ...]) -> list[GenerateEvent]:
        if self.started:
            return []
        self.started = True
        self.prefix = read_cached(body["cached"])
        if self.task is not None:
            self.task.end(len(self.request.token_ids) - self.prefix.n_tokens)
        events: list[GenerateEvent] = []
        if tokens:
            logprobs = reading(lambda b: read_logprobs(b["logprobs"]), body)
            self._check(tokens)
            found = self.prefix
            cached = (
                (None, 0, None) if self.emitted else (found.n_tokens, found.replayed, found.window)
            )
            events.append(
                TokensEvent(
                    self.emitted, tokens, logprobs, *cached, prompt_logprobs=tuple(self._prompt)
                )
            )
            self.emitted += len(tokens)
        return events + self._finish(body)

    def _tokens(self, body: Body) -> list[GenerateEvent]:
        index, tokens = int(body["index"]), unpack_tokens(body["tokens"])
        if index != self.emitted:
            raise TransferError(f"it sent token {index}, {self.emitted} was due")
        self._check(tokens)
        self.emitted += len(tokens)
        events: list[GenerateEvent] = []
        if tokens:
            logprobs = reading(lambda b: read_logprobs(b["logprobs"]), body)
            events.append(TokensEvent(index, tokens, logprobs))
        if body.get("finish") is not None:
            self.decode_done = True
        return events + self._finish(body)

    def _check(self, tokens: tuple[int, ...]) -> None:
        size = self.decode_info.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            raise TransferError(f"it sent tokens outside 0..{size - 1}")

    def _finish(self, body: Body) -> list[GenerateEvent]:
        finish: FinishReason | None = body.get("finish")
        if finish is None:
            return []
        self.prefill_done = True
        usage = reading(lambda b: read_usage(b["usage"]), body)
        return [FinishEvent(finish, usage, self._timings())]

    def _timings(self) -> Timings:
        first = self._first_at or time.monotonic()
        return Timings(
            queued=self._reserved - self._began,
            prefill=first - self._reserved,
            transferred=max(0.0, (self._ready_at or first) - first),
        )

    def _usage(self) -> Usage:
        return Usage(
            len(self.request.token_ids),
            self.emitted,
            self.prefix.n_tokens,
            replayed_tokens=self.prefix.replayed,
            window=self.prefix.window,
        )

    def _lost(self, link: WorkerLink, what: str) -> Retry:
        message = f"the {link.role} worker {link.address} {what}"
        if self.emitted:
            return Retry(EngineLost(f"{message} while the request ran; send it again"), link)
        return Retry(EngineUnavailable(f"{message}; try again in a second"), link)

    def _leaves(self, link: WorkerLink) -> Retry:
        text = f"the {link.role} worker {link.address} is draining"
        kind = EngineLost if self.emitted else EngineUnavailable
        return Retry(kind(f"{text}; send the request again"), link, refused=True, planned=True)

    def _aborted(self, mail: Mail) -> Exception:
        body = mail.body
        reason, message = quoted(body.get("reason", "")), quoted(body.get("message", ""))
        match reason:
            case "too_long":
                return PromptTooLong(int(body["prompt_tokens"]), int(body["max_tokens"]))
            case "capacity":
                return CapacityError(message)
            case "too_complex":
                return SchemaTooComplex(message, param=body.get("param"))
            case "constraint":
                return ConstraintError(message, param=body.get("param"))
            case "unenforceable":
                return ConstraintsUnavailable(message)
            case "request":
                return RequestError(message)
            case "no_encoder":
                kind = EngineLost if self.emitted else EngineUnavailable
                return Retry(kind(f"{message}; try again later"), mail.link, starved=True)
            case "draining":
                return self._leaves(mail.link)
            case _:
                blamed = {"prefill": self.prefill, "decode": self.decode}.get(
                    str(body.get("blame")), mail.link
                )
                if blamed is mail.link:
                    return self._lost(blamed, f"gave up ({reason}: {message})")
                text = f"failed the {mail.link.role} worker {mail.link.address}"
                lost = self._lost(blamed, f"{text} ({reason}: {message})")
                lost.told_by = mail.link
                return lost

    def leave(self) -> None:
        """Tell whoever still works for this attempt to stop."""
        for link, done in ((self.decode, self.decode_done), (self.prefill, self.prefill_done)):
            if not done:
                link.send(FrameType.ABORT, abort_body(self.xid, "left"))
