"""The decode worker: reserves memory, lets prefill write it, runs what has landed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.constraint import ConstraintState, mask_behind
from deepinfer_engine.core.durations import Durations
from deepinfer_engine.core.grammars import GrammarCompiler
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.prefix_store import PrefixBlocks, PrefixStore
from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import EngineUnavailable, RequestError, TransferError
from deepinfer_engine.pd.announcing import Announcing
from deepinfer_engine.pd.landing import Attempt, Commit, Landings, Stage
from deepinfer_engine.pd.messages import (
    cached_body,
    check_request,
    logprobs_body,
    pack_tokens,
    read_cached,
    read_logprobs,
    read_request,
    reading,
    token_array,
    unpack_tokens,
    usage_body,
    xid_body,
)
from deepinfer_engine.pd.peers import ModelIdentity, abort_body, xid_of
from deepinfer_engine.pd.refusals import refusal
from deepinfer_engine.pd.remote_writes import RemoteWrites
from deepinfer_engine.pd.rings import UnitReceiver
from deepinfer_engine.pd.service import Helpers, WorkerService
from deepinfer_engine.pd.transport import Connection, Frame
from deepinfer_engine.pd.wire import Body, FrameType, UnitHeader, Xid, unit_digest

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
HOLD_EVERY_S = 5.0
RESERVATION_S = 600.0
"""A reservation that nothing was committed to for this long is given up."""
ROOM_S = 0.05
"""Behind which a request that found no memory asks again, beside every end and every second."""


@dataclass(eq=False, slots=True)
class Offer:
    """A request the router wants to place here, before and after its memory is reserved."""

    xid: Xid
    router: Connection
    body: Body
    prompt_len: int
    since: float
    priority: int = 0
    compiling: asyncio.Task[None] | None = None
    """Set while the grammar of the request is being compiled."""
    constraint: ConstraintState | None = None
    asked: tuple[Connection, tuple[int, ...]] | None = None
    """The prefill worker that wants to know the first token's mask, and the output before it."""


async def serve_decode(
    runner: StepRunner,
    store: PrefixStore | None,
    listen: str,
    *,
    config: EngineConfig | None = None,
    cluster_key: bytes | None = None,
    grammars: GrammarCompiler | None = None,
    identity: ModelIdentity | None = None,
    helpers: Helpers | None = None,
    looked: Callable[[str], None] = lambda trouble: None,
    announcing: Announcing | None = None,
    writes: RemoteWrites | None = None,
    ready: Callable[[str], None] = lambda address: None,
    stop: asyncio.Event | None = None,
    drain_timeout_s: float = 120.0,
) -> None:
    """Serve decode on `listen` ("host:port", port 0 = any) until SIGTERM, SIGINT or `stop`; drain.

    Calls `ready("host:port")` once with the bound address. `store` and `grammars` are closed at
    the end. Raises ConfigError for an unusable address, or a non-loopback one without
    `cluster_key`. `looked` hears twice a second, from a thread of its own, why no step ends.
    `helpers`: processes that `runner` computes with; the worker ends when one of them does.
    `announcing`: routers that are told that this worker is there. `writes`: with it, prefill
    workers that ask for a place to write to are lent one.
    """
    service = DecodeService(
        runner,
        store,
        config or EngineConfig(),
        cluster_key,
        grammars,
        identity=identity,
        helpers=helpers,
    )
    service.on_look = looked
    service.announcing = announcing
    service.writes = writes
    await service.serve(listen, ready=ready, stop=stop, drain_timeout_s=drain_timeout_s)


class DecodeService(WorkerService):
    """Everything here runs on the event loop."""

    def __init__(
        self,
        runner: StepRunner,
        store: PrefixStore | None,
        config: EngineConfig,
        cluster_key: bytes | None,
        grammars: GrammarCompiler | None = None,
        *,
        identity: ModelIdentity | None = None,
        helpers: Helpers | None = None,
    ) -> None:
        super().__init__(
            "decode",
            runner,
            store,
            config,
            cluster_key,
            grammars,
            identity=identity,
            helpers=helpers,
        )
        self._config = config
        self.landings = Landings(self.loop, runner, first_grant=self.epoch & 0xFFFFFFFFFFFF)
        self._offers: dict[str, Offer] = {}
        """Every request known here, by attempt key."""
        self.writes: RemoteWrites | None = None
        """Set before `serve`: what lends places to prefill workers that ask."""
        self._receivers: dict[Connection, UnitReceiver] = {}
        """Of prefill workers."""
        self._hold_at = 0.0
        self._queue: list[Offer] = []
        """Offers that wait for memory."""
        self._waited = Durations("queue")

    def role_handle(self, peer: Connection, kind: FrameType, frame: Frame) -> None:
        role = peer.hello.get("role")
        receiver = self._receivers.get(peer)
        if receiver is not None and self._of_units(receiver, peer, kind, frame):
            return
        if kind is FrameType.PING and role == "prefill":
            body = frame.body()
            digest = unit_digest([memoryview(body["data"])])
            peer.send(FrameType.PONG, {"id": body["id"], "digest": digest})
            return
        if kind is FrameType.GONE and "rid" not in frame.body():
            return
        xid, body = xid_of(frame)
        match kind:
            case FrameType.RESERVE if role == "router":
                self._reserve(peer, xid, body)
            case FrameType.MASK_WANTED if role == "prefill":
                self._mask_wanted(peer, xid, body)
            case FrameType.STORED if role == "prefill":
                self._load(peer, xid, body)
            case FrameType.COMMIT if role == "prefill":
                self._commit(peer, xid, body)
            case FrameType.ABORT:
                self._peer_aborts(peer, xid, body)
            case FrameType.STATUS:
                attempt = self.landings.get(xid)
                state = attempt.stage.value if attempt else "gone"
                seen = attempt.units_seen if attempt else 0
                peer.send(
                    FrameType.STATUS_REPLY, {**xid_body(xid), "state": state, "units_seen": seen}
                )
            case FrameType.GONE | FrameType.ABORT_ACK:
                pass
            case _:
                raise TransferError(f"a {role} peer may not send {kind.name} to a decode worker")

    def chunk_done(self, chunk: Chunk) -> None:
        raise RuntimeError(f"a decode worker computed prompt tokens of {chunk.seq.key}")

    # -- reservations ---------------------------------------------------------------------------

    def _reserve(self, router: Connection, xid: Xid, body: Body) -> None:
        prompt_len = reading(lambda b: int(b["prompt_len"]), body)
        if body.get("epoch") != self.epoch:
            router.send(FrameType.STALE_EPOCH, xid_body(xid))
        elif body.get("layout_hash") != self.runner.layout.layout_hash:
            message = "prefill and decode workers run different models, dtypes or cache formats"
            router.send(FrameType.ABORT, abort_body(xid, "layout", message))
        elif self.draining or xid.key in self._offers:
            reason = "draining" if self.draining else "duplicate"
            router.send(FrameType.BUSY, self._busy(xid, reason))
        else:
            # The request's fields are read now, so that one that cannot be run is refused now.
            request = reading(lambda b: read_request(b, xid, ()), body)
            try:
                check_request(request, self.runner.caps.vocab_size, prompt_len=prompt_len)
            except RequestError as error:
                router.send(FrameType.ABORT, refusal(xid, error))
                return
            now, priority = time.monotonic(), request.sampling.priority
            offer = Offer(xid, router, body, prompt_len, now, priority)
            if self._queue or not self._place(offer):
                self._enqueue(offer)
            if request.sampling.constraint is not None and xid.key in self._offers:
                offer.compiling = self.spawn(self._compile(offer, request.sampling))

    async def _compile(self, offer: Offer, sampling: SamplingParams) -> None:
        """Prefill waits for the mask of its first token; the tokens after it are sampled here."""
        try:
            offer.constraint = await self.compiler.compiled(sampling, str(offer.body["salt"]))
        except RequestError as error:
            offer.router.send(FrameType.ABORT, refusal(offer.xid, error))
        except EngineUnavailable as error:
            offer.router.send(FrameType.ABORT, abort_body(offer.xid, "full", str(error)))
        except Exception as error:
            log.exception("compiling the constraint of %s failed", offer.xid.key)
            body = abort_body(offer.xid, "engine", f"compiling the constraint failed: {error}")
            offer.router.send(FrameType.ABORT, body)
        else:
            offer.compiling = None
            self._answer_mask(offer)
            attempt = self.landings.get(offer.xid)
            if attempt is not None and isinstance(attempt.writer, Connection):
                self._start_if_ready(attempt, attempt.writer)
            return
        self._drop(offer.xid)

    def _mask_wanted(self, peer: Connection, xid: Xid, body: Body) -> None:
        offer = self._offers.get(xid.key)
        if offer is None:
            peer.send(FrameType.GONE, xid_body(xid))
            return
        self._check_tokens(body["tokens"], xid)
        offer.asked = peer, unpack_tokens(body["tokens"])
        if offer.compiling is None:
            self._answer_mask(offer)

    def _answer_mask(self, offer: Offer) -> None:
        if offer.asked is not None:
            self.spawn(self._send_mask(offer, *offer.asked))
            offer.asked = None

    async def _send_mask(self, offer: Offer, peer: Connection, tokens: tuple[int, ...]) -> None:
        """In a thread: where nobody has been yet, what may come takes milliseconds to find."""
        mask: bytes | None = None
        try:
            if offer.constraint is not None:
                prefix = str(offer.body["sampling"]["constraint"]["prefix"])
                row = await asyncio.to_thread(mask_behind, offer.constraint.grammar, prefix, tokens)
                mask = row.astype("<i4").tobytes()
        except Exception as error:
            log.exception("the mask of %s could not be made", offer.xid.key)
            self._end(offer.xid, "engine", f"the mask could not be made: {error}")
            return
        peer.send(FrameType.MASK, {**xid_body(offer.xid), "mask": mask})

    def _enqueue(self, offer: Offer) -> None:
        if len(self._queue) >= self._config.max_queue:
            offer.router.send(FrameType.BUSY, self._busy(offer.xid, "full"))
            return
        self._offers[offer.xid.key] = offer
        self._queue.append(offer)
        self._place_queued()
        # What runs in a worse class makes room between two steps.
        asyncio.get_running_loop().call_later(ROOM_S, self._place_queued)

    def _busy(self, xid: Xid, reason: str) -> Body:
        return {**xid_body(xid), "reason": reason, "retry_after_ms": int(RETRY_AFTER_S * 1000)}

    def _place(self, offer: Offer) -> bool:
        """Answer RESERVED or ABORT; False when there is no memory now."""
        try:
            attempt = self.landings.reserve(offer.xid, offer.prompt_len, offer.priority)
        except RequestError as error:
            offer.router.send(FrameType.ABORT, refusal(offer.xid, error))
            self._offers.pop(offer.xid.key, None)
            return True
        if attempt is None:
            return False
        self._offers[offer.xid.key] = offer
        self._waited.observe(time.monotonic() - offer.since)
        offer.router.send(
            FrameType.RESERVED,
            {**xid_body(offer.xid), "grant_id": attempt.grant_id, "epoch": self.epoch},
        )
        return True

    def _place_queued(self) -> None:
        """By class, which waiting raises, and arrival. One that does not fit holds up the rest."""
        now, age_s = time.monotonic(), self._config.age_s

        def rank(offer: Offer) -> tuple[int, float]:
            aged = int((now - offer.since) / age_s) if age_s > 0 else 0
            return offer.priority - aged, offer.since

        while self._queue:
            first = min(self._queue, key=rank)
            if not self._place(first):
                return
            self._queue.remove(first)

    # -- what prefill sends ---------------------------------------------------------------------

    def _of_units(
        self, receiver: UnitReceiver, peer: Connection, kind: FrameType, frame: Frame
    ) -> bool:
        """Whether it was a unit, or about memory for units."""
        if kind is FrameType.UNIT and frame.placed:
            self._unit(peer, UnitHeader.unpack(frame.data, elsewhere=True), None)
        elif kind is FrameType.UNIT or kind is FrameType.UNIT_AT:
            header, payload = receiver.unit(frame)
            try:
                self._unit(peer, header, payload)
            finally:
                payload.release()
            receiver.read(frame)
        elif kind is FrameType.SHARED:
            receiver.open(frame.body())
        elif kind is FrameType.LANDING_WANTED:
            receiver.lend(self.writes)
        else:
            return False
        return True

    def peer_joined(self, peer: Connection) -> None:
        super().peer_joined(peer)
        if peer.hello.get("role") == "prefill":
            peer.place = functools.partial(self._place_unit, peer)
            self._receivers[peer] = UnitReceiver(peer)

    def _place_unit(self, peer: Connection, header: UnitHeader) -> Sequence[memoryview] | None:
        """What is wrong with it is told when it is known to be the peer's."""
        with contextlib.suppress(TransferError):
            return self.landings.place(peer, header)
        return None

    def _unit(self, peer: Connection, header: UnitHeader, payload: memoryview | None) -> None:
        """`payload`: None where it lies in its blocks."""
        try:
            if payload is None:
                attempt = self.landings.placed(peer, header)
            else:
                attempt = self.landings.unit(peer, header, payload)
        except TransferError as error:
            self._break(self.landings.granted(header.grant_id), peer, str(error))
            return
        if attempt is None:
            peer.send(FrameType.GONE, {"grant_id": header.grant_id})
        elif header.unit in attempt.corrupt_units:
            peer.send(FrameType.NACK, {**xid_body(attempt.xid), "unit": header.unit})
        else:
            self._start_if_ready(attempt, peer)

    def _load(self, peer: Connection, xid: Xid, body: Body) -> None:
        """Bring what is cached of a prompt from the store, and say how much that was."""
        try:
            self._check_tokens(body["tokens"], xid)
            tokens = unpack_tokens(body["tokens"])
            begun = self.landings.load_begins(peer, xid, tokens)
        except TransferError as error:
            self._break(self.landings.get(xid), peer, str(error))
            return
        if begun is None:
            peer.send(FrameType.GONE, xid_body(xid))
            return
        attempt, views = begun
        if self.connector is None:
            self._load_ended(attempt, peer, 0)
            return
        request = read_request(self._offers[xid.key].body, xid, ())
        self.connector.load_blocks(
            PrefixBlocks(tokens, request.salt, request.pictures, body["generation"]),
            views,
            lambda blocks: self.post(self._load_ended, attempt, peer, blocks),
        )

    def _load_ended(self, attempt: Attempt, peer: Connection, blocks: int) -> None:
        if self.landings.load_ended(attempt, blocks):
            peer.send(FrameType.LOADED, {**xid_body(attempt.xid), "blocks": blocks})
        self._place_queued()

    def _commit(self, peer: Connection, xid: Xid, body: Body) -> None:
        try:
            self._check_tokens(body["tokens"], xid)
            self._check_tokens(pack_tokens((body["first_token"],)), xid)
            commit = reading(_read_commit, body)
            attempt = self.landings.commit(peer, xid, commit)
        except TransferError as error:
            self._break(self.landings.get(xid), peer, str(error))
            return
        if attempt is None:
            peer.send(FrameType.GONE, xid_body(xid))
        else:
            self._start_if_ready(attempt, peer)

    def _check_tokens(self, packed: bytes, xid: Xid) -> None:
        """As an array: a long prompt's units take hardly longer than Python's look at each."""
        size, tokens = self.runner.caps.vocab_size, token_array(packed)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < size:
            raise TransferError(f"{xid.key} was committed with tokens outside 0..{size - 1}")

    def refuse(self, peer: Connection, xid: Xid, message: str) -> None:
        if peer.hello.get("role") == "prefill":
            self._break(self.landings.get(xid), peer, message)
        else:
            super().refuse(peer, xid, message)
            if xid.key in self._offers and self._offers[xid.key].router is peer:
                self._drop(xid)

    def _start_if_ready(self, attempt: Attempt, peer: Connection) -> None:
        commit, offer = attempt.commit, self._offers[attempt.xid.key]
        if attempt.stage is not Stage.READY or commit is None or offer.compiling is not None:
            return
        request = read_request(offer.body, attempt.xid, commit.tokens)
        seq = LiveSequence(request, attempt.xid.key, time.monotonic(), offer.constraint)
        seq.tokens.append(commit.first_token)
        seq.prefix = commit.prefix
        self.landings.run(attempt, seq)
        peer.send(FrameType.RELEASED, xid_body(attempt.xid))
        offer.router.send(
            FrameType.READY,
            {
                **xid_body(attempt.xid),
                "token": commit.first_token,
                "logprobs": logprobs_body(commit.first_logprobs),
                "cached": cached_body(commit.prefix),
            },
        )

    def _break(self, attempt: Attempt | None, peer: Connection, message: str) -> None:
        """A transfer broke its protocol: end the attempt and tell both ends."""
        if attempt is None:
            peer.send(FrameType.GONE, {})
            return
        peer.send(FrameType.ABORT, abort_body(attempt.xid, "protocol", message))
        self._end(attempt.xid, "protocol", message, blame="prefill")

    # -- ends -----------------------------------------------------------------------------------

    def _peer_aborts(self, peer: Connection, xid: Xid, body: Body) -> None:
        offer, attempt = self._offers.get(xid.key), self.landings.get(xid)
        running = attempt is not None and attempt.stage is Stage.RUNNING
        if offer is not None and peer is offer.router:
            self._drop(xid)
            if running:
                return  # acknowledged when the step that uses its memory is over
        elif offer is not None and not running:
            self._end(xid, str(body.get("reason")), str(body.get("message", "")), blame="prefill")
        peer.send(FrameType.ABORT_ACK, xid_body(xid))

    def _end(self, xid: Xid, reason: str, message: str, *, blame: str | None = None) -> None:
        offer = self._offers.get(xid.key)
        if offer is not None:
            body = abort_body(xid, reason, message)
            offer.router.send(FrameType.ABORT, body if blame is None else {**body, "blame": blame})
            self._drop(xid)

    def _drop(self, xid: Xid) -> None:
        """Free everything of an attempt; of a running one when its step is over."""
        attempt = self.landings.get(xid)
        if attempt is not None and attempt.stage is Stage.RUNNING:
            self.loop.abort(xid.key)
            return
        offer = self._offers.pop(xid.key)
        if offer.compiling is not None and offer.compiling is not asyncio.current_task():
            offer.compiling.cancel()
        if attempt is None:
            self._queue.remove(offer)
        else:
            # Units are written by this very thread: without its grant the writer is gone.
            self.landings.abort(attempt)
            self.landings.revoke(attempt)
        self._place_queued()

    def peer_lost(self, peer: Connection) -> None:
        super().peer_lost(peer)
        receiver = self._receivers.pop(peer, None)
        if receiver is not None:
            receiver.close()
        if peer.hello.get("role") == "router":
            for offer in [o for o in self._offers.values() if o.router is peer]:
                self._drop(offer.xid)
        for attempt in self.landings.written_by(peer):
            self._end(attempt.xid, "prefill_lost", "the prefill worker went away", blame="prefill")

    def on_progress(self, progress: Progress) -> None:
        offer = self._offers.get(progress.seq.key)
        if offer is None:
            return
        body: Body = {
            **xid_body(offer.xid),
            "index": progress.index,
            "tokens": pack_tokens(progress.tokens),
            "logprobs": logprobs_body(progress.logprobs),
        }
        if progress.finish is not None:
            body["finish"] = progress.finish
            body["usage"] = usage_body(progress.seq.usage())
        if self.failure is not None:
            offer.router.send(FrameType.ABORT, abort_body(offer.xid, "engine", str(self.failure)))
        elif progress.finish == "abort":
            offer.router.send(FrameType.ABORT_ACK, xid_body(offer.xid))
        else:
            offer.router.send(FrameType.TOKENS, body)
        if progress.finish is not None:
            attempt = self.landings.get(offer.xid)
            if attempt is not None:
                self.landings.done(attempt)
            del self._offers[offer.xid.key]
            self._place_queued()

    def reap(self, now: float) -> None:
        if now >= self._hold_at:
            self._hold_at = now + HOLD_EVERY_S
            self._hold()
        for attempt in list(self.landings):
            offer = self._offers[attempt.xid.key]
            if attempt.stage is not Stage.RUNNING and now - offer.since > RESERVATION_S:
                text = f"nothing was committed in {RESERVATION_S} s"
                self._end(attempt.xid, "timeout", text, blame="prefill")
        self._place_queued()

    def _hold(self) -> None:
        """Tell prefill workers to keep what was committed and cannot run yet."""
        waiting: dict[Connection, list[str]] = {}
        for attempt in self.landings:
            committed = attempt.stage in (Stage.COMMITTED, Stage.READY)
            if committed and isinstance(attempt.writer, Connection):
                waiting.setdefault(attempt.writer, []).append(attempt.xid.key)
        for writer, keys in waiting.items():
            writer.send(FrameType.HELD, {"keys": keys[:4096]})

    def unfinished(self) -> int:
        return len(self._offers)

    def extra_gauges(self) -> dict[str, float]:
        return {
            "blocks_writer_held": self.landings.writer_held_blocks,
            "reserve_queue": len(self._queue),
        }

    def extra_counters(self) -> dict[str, float]:
        return {**self.landings.counters, **self._waited.counters()}


def _read_commit(body: Body) -> Commit:
    return Commit(
        n_units=int(body["n_units"]),
        digest=int(body["digest"]),
        tokens=unpack_tokens(body["tokens"]),
        first_token=int(body["first_token"]),
        first_logprobs=read_logprobs(body["first_logprobs"]),
        prefix=read_cached(body["cached"]),
    )
