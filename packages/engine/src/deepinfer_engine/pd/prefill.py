"""The prefill worker: computes prompts and pushes their KV into reserved decode memory."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable

import numpy as np

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.constraint import GivenMask
from deepinfer_engine.core.durations import Durations
from deepinfer_engine.core.pictures import RowForm
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.prefix_store import PrefixStore
from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.types import GenerateRequest
from deepinfer_engine.core.windows import Prefix
from deepinfer_engine.errors import ConfigError, EngineUnavailable, RequestError, TransferError
from deepinfer_engine.pd import transport, wire
from deepinfer_engine.pd.announcing import Announcing
from deepinfer_engine.pd.jobs import ChunkDone, Found, Job, Pixels, commit_body, read_prefill
from deepinfer_engine.pd.messages import (
    MAX_PIXEL_BYTES,
    cached_body,
    check_request,
    logprobs_body,
    pack_tokens,
    reading,
    usage_body,
    xid_body,
)
from deepinfer_engine.pd.peers import ModelIdentity, abort_body, xid_of
from deepinfer_engine.pd.pictures import CACHE_BYTES, PictureClient
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.refusals import refusal
from deepinfer_engine.pd.remote_writes import RemoteWrites
from deepinfer_engine.pd.rings import OF_RINGS, UnitSender
from deepinfer_engine.pd.schema import Encoding
from deepinfer_engine.pd.sending import Outgoing
from deepinfer_engine.pd.service import Helpers, WorkerService
from deepinfer_engine.pd.transport import Connection, Frame
from deepinfer_engine.pd.wire import Body, FrameType, Xid

log = logging.getLogger(__name__)

PROBE_BYTES = 64 * 1024
PROBE_S = 5.0
LOGPROBS_A_PIECE = 4096
"""Prompt tokens whose log-probabilities go in one message."""
LEASE_MORE_S = 20.0
LEASE_S = 30.0
"""How long a prompt's KV is kept after COMMIT for a decode worker that says nothing."""


async def serve_prefill(
    runner: StepRunner,
    store: PrefixStore | None,
    listen: str,
    *,
    config: EngineConfig | None = None,
    cluster_key: bytes | None = None,
    identity: ModelIdentity | None = None,
    helpers: Helpers | None = None,
    looked: Callable[[str], None] = lambda trouble: None,
    announcing: Announcing | None = None,
    shares_memory: bool = True,
    loads_stored: bool = False,
    writes: RemoteWrites | None = None,
    encoding: Encoding = "own",
    picture_cache_bytes: int = CACHE_BYTES,
    ready: Callable[[str], None] = lambda address: None,
    stop: asyncio.Event | None = None,
    drain_timeout_s: float = 120.0,
) -> None:
    """Serve prefill on `listen` ("host:port", port 0 = any) until SIGTERM, SIGINT or `stop`; drain.

    Calls `ready("host:port")` once with the bound address. `store` is closed at the end. Raises
    ConfigError for an unusable address, or a non-loopback one without `cluster_key`. `looked` hears
    twice a second, from a thread of its own, why no step ends.
    `helpers`: processes that `runner` computes with; the worker ends when one of them does.
    `announcing`: routers that are told that this worker is there. `shares_memory`: whether units
    to decode workers of this machine go through shared memory. `loads_stored`: whether a decode
    worker on the same store loads from it what is cached of a prompt, instead of being sent it.
    `writes`: units go by one-sided writes to decode workers that lend a place for them.
    `encoding`: where pictures are encoded: by `runner`, by encode workers, or by `runner` where no
    encode worker takes them. Without a tower of its own `runner` wants `workers`.
    `picture_cache_bytes`: embeddings that are kept of what encode workers sent.
    """
    service = PrefillService(
        runner,
        store,
        config or EngineConfig(),
        cluster_key,
        identity=identity,
        helpers=helpers,
        encoding=encoding,
        picture_cache_bytes=picture_cache_bytes,
    )
    service.on_look = looked
    service.announcing = announcing
    service.units.shares_memory = shares_memory
    service.loads_stored = loads_stored
    service.units.writes = writes
    await service.serve(listen, ready=ready, stop=stop, drain_timeout_s=drain_timeout_s)


class PrefillService(WorkerService):
    """Everything here runs on the event loop, except `chunk_done`."""

    def __init__(
        self,
        runner: StepRunner,
        store: PrefixStore | None,
        config: EngineConfig,
        cluster_key: bytes | None,
        *,
        identity: ModelIdentity | None = None,
        helpers: Helpers | None = None,
        encoding: Encoding = "own",
        picture_cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(
            "prefill",
            runner,
            store,
            config,
            cluster_key,
            identity=identity,
            helpers=helpers,
        )
        self._pongs: dict[int, asyncio.Future[int]] = {}
        self._ping_ids = itertools.count(1)
        self._jobs: dict[str, Job] = {}
        self._pixels: dict[str, Pixels] = {}
        """Of pictures whose prompt has not been announced yet."""
        self._decodes: dict[str, asyncio.Task[Connection]] = {}
        """Links to decode workers by address, connecting or connected."""
        self._transferred = Durations("transfer")
        self._handed_over = Durations("handover")
        self.units = UnitSender()
        self.loads_stored = False
        """Whether a decode worker on the same store loads from it what is cached."""
        if self.connector is not None:
            self.connector.on_hit = self._found
        self._resends = 0
        self._encoding: Encoding = encoding
        self.pictures = self._picture_client(picture_cache_bytes)

    def _picture_client(self, cache_bytes: int) -> PictureClient | None:
        """None where pictures are encoded here, or there are none."""
        rules = self.runner.caps.pictures
        if self._encoding == "own" or rules is None:
            return None
        client = PictureClient(
            RowForm(rules, self.identity.dtype or "float32", self.identity.model),
            hello=self.hello,
            cluster_key=self.cluster_key,
            post=self.post,
            spawn=self.spawn,
            abort=self.loop.abort,
            has_tower=self._encoding == "either",
            cache_bytes=cache_bytes,
        )
        self.loop.gather = client.gather
        return client

    def hello(self) -> Body:
        return {**super().hello(), "encoding": self._encoding}

    def role_handle(self, peer: Connection, kind: FrameType, frame: Frame) -> None:
        role = peer.hello.get("role")
        if kind is FrameType.GONE and "rid" not in frame.body():
            return  # a unit reached an attempt that has ended: its ABORT is on the way
        if kind is FrameType.PROBE and role == "router":
            self.spawn(self._probe(peer, frame.body()))
            return
        if kind in OF_RINGS and role == "decode":
            self.units.hear(peer, kind, frame.body())
            return
        if kind is FrameType.HELD and role == "decode":
            self._hold(peer, frame.body()["keys"])
            return
        if kind is FrameType.PONG and role == "decode":
            body = frame.body()
            pong = self._pongs.get(body["id"])
            if pong is not None and not pong.done():
                pong.set_result(body["digest"])
            return
        xid, body = xid_of(frame)
        job = self._jobs.get(xid.key)
        match kind:
            case FrameType.PREFILL if role == "router":
                self._prefill(peer, xid, body)
            case FrameType.PIXELS if role == "router":
                self._collect(peer, xid, body)
            case FrameType.RELEASED if role == "decode":
                if job is not None:
                    self._observe(job, time.monotonic())
                    self.loop.release(xid.key)
                    self._forget(job)
            case FrameType.MASK if role == "decode":
                if job is not None and job.mask is not None and not job.mask.done():
                    job.mask.set_result(body["mask"])
            case FrameType.LOADED if role == "decode":
                if job is not None:
                    self._loaded(job, reading(lambda b: int(b["blocks"]), body))
            case FrameType.NACK if role == "decode":
                if job is not None:
                    self._resend(job, reading(lambda b: int(b["unit"]), body))
            case FrameType.ABORT | FrameType.GONE if job is not None and peer is not job.router:
                reason, text = str(body.get("reason", "gone")), str(body.get("message", ""))
                told = {**abort_body(job.xid, reason, text), "blame": "decode"}
                self._fail(job, "", "", body=told, tell_decode=False)
            case FrameType.ABORT:
                # Acknowledged when the step that uses its memory is over.
                if job is None:
                    self._pixels.pop(xid.key, None)
                    peer.send(FrameType.ABORT_ACK, xid_body(xid))
                elif job.asking is not None:
                    self._forget(job)
                    peer.send(FrameType.ABORT_ACK, xid_body(xid))
                else:
                    self._stop_pushing(job)
                    self.loop.abort(xid.key)
            case FrameType.STATUS:
                state = "gone" if job is None else "committed" if job.lease_until else "writing"
                seen = 0 if job is None else len(job.out.units)
                peer.send(
                    FrameType.STATUS_REPLY, {**xid_body(xid), "state": state, "units_seen": seen}
                )
            case FrameType.GONE | FrameType.ABORT_ACK:
                pass
            case _:
                raise TransferError(f"a {role} peer may not send {kind.name} to a prefill worker")

    def _hold(self, peer: Connection, keys: Iterable[str]) -> None:
        """Decode waits for what is not this worker's: keep the memory of these."""
        until = time.monotonic() + LEASE_MORE_S
        for key in keys:
            job = self._jobs.get(key)
            if job is not None and job.decode is peer and job.lease_until is not None:
                job.lease_until = max(job.lease_until, until)

    # -- a prompt arrives -----------------------------------------------------------------------

    def _collect(self, router: Connection, xid: Xid, body: Body) -> None:
        """Keep pixels until their prompt is announced."""
        pixels = self._pixels.setdefault(xid.key, Pixels(router))
        data = reading(lambda b: bytes(b["data"]), body)
        if len(pixels.data) + len(data) > MAX_PIXEL_BYTES:
            raise TransferError(f"the pictures of a request take at most {MAX_PIXEL_BYTES} bytes")
        pixels.data += data

    def _prefill(self, router: Connection, xid: Xid, body: Body) -> None:
        collected = self._pixels.pop(xid.key, None)
        if body.get("epoch") != self.epoch:
            router.send(FrameType.STALE_EPOCH, xid_body(xid))
            return
        if self.draining or xid.key in self._jobs:
            reason = "draining" if self.draining else "duplicate"
            router.send(FrameType.ABORT, abort_body(xid, reason, "the worker does not take it"))
            return
        pixels = b"" if collected is None else bytes(collected.data)
        try:
            request, address, epoch, grant = read_prefill(body, xid, pixels)
            check_request(request, self.runner.caps.vocab_size, prompt_len=len(request.token_ids))
        except RequestError as error:
            router.send(FrameType.ABORT, refusal(xid, error))
            return
        except (ValueError, ConfigError) as error:
            router.send(FrameType.ABORT, abort_body(xid, "request", str(error)))
            return
        out = Outgoing(self.runner, grant, xid.attempt, len(request.token_ids))
        job = Job(xid, router, address, epoch, out)
        self._jobs[xid.key] = job
        if self.pictures is not None and request.pictures:
            failed = functools.partial(self._fail, job)
            self.pictures.follow(xid, request.salt, body.get("encoders", ()), failed)
        if request.sampling.constraint is None:
            self._submit(job, request, None)
        else:
            job.asking = self.spawn(self._ask_mask(job, request))

    async def _ask_mask(self, job: Job, request: GenerateRequest) -> None:
        """The prompt waits for its grammar here, not in the scheduler's queue.

        A grammar that decode cannot compile it refuses to the router, which ends this job.
        """
        job.mask = asyncio.get_running_loop().create_future()
        answered = request.token_ids[len(request.token_ids) - request.resumed :]
        try:
            decode = job.decode = await self._decode_link(job.decode_address, job.decode_epoch)
            decode.send(
                FrameType.MASK_WANTED, {**xid_body(job.xid), "tokens": pack_tokens(answered)}
            )
            mask = await job.mask
            constraint = None if mask is None else self._given(mask)
        except (OSError, TransferError, TimeoutError) as error:
            self._lost_decode(job, error)
        else:
            self._submit(job, request, constraint)

    def _given(self, mask: bytes) -> GivenMask:
        words = -(-self.runner.caps.vocab_size // 32)
        if len(mask) != 4 * words:
            raise TransferError(f"a mask of {len(mask)} bytes, not {4 * words}")
        return GivenMask(np.frombuffer(mask, dtype="<i4").astype(np.int32))

    def _lost_decode(self, job: Job, error: Exception) -> None:
        text = f"cannot reach the decode worker: {error}"
        body = {**abort_body(job.xid, "decode_lost", text), "blame": "decode"}
        self._fail(job, "", "", body=body)

    def _submit(self, job: Job, request: GenerateRequest, constraint: GivenMask | None) -> None:
        job.asking = None
        try:
            self.loop.submit(request, job.xid.key, time.monotonic(), constraint)
        except RequestError as error:
            self._fail(job, "", "", body=refusal(job.xid, error))
        except EngineUnavailable as error:
            self._fail(job, "full", str(error))
        else:
            job.pusher = self.spawn(self._push(job))

    # -- its KV leaves --------------------------------------------------------------------------

    def chunk_done(self, chunk: Chunk) -> None:
        seq = chunk.seq
        done = ChunkDone(chunk.end, tuple(seq.blocks), seq.state_slot)
        self.post(self._step_done, seq.key, done)

    def on_progress(self, progress: Progress) -> None:
        key = progress.seq.key
        job = self._jobs.get(key)
        if job is None:
            return
        if progress.finish == "abort":
            job.router.send(FrameType.ABORT_ACK, xid_body(job.xid))
            self._forget(job)
        elif self.failure is not None:
            self._fail(job, "engine", str(self.failure))
        else:
            body = {
                **xid_body(job.xid),
                "tokens": pack_tokens(progress.tokens),
                "logprobs": logprobs_body(progress.logprobs),
                "cached": cached_body(progress.seq.cached),
            }
            if progress.finish is not None:
                body["finish"] = progress.finish
                body["usage"] = usage_body(progress.seq.usage())
            if self.pictures is not None:
                self.pictures.read(progress.seq)
            said = progress.seq.prompt_logprobs
            for at in range(0, len(said), LOGPROBS_A_PIECE):
                piece = logprobs_body(said[at : at + LOGPROBS_A_PIECE])
                job.router.send(FrameType.PROMPT_LOGPROBS, {**xid_body(job.xid), "logprobs": piece})
            job.router.send(FrameType.FIRST, body)
            if progress.finish is not None:
                self._forget(job)  # nothing will be decoded; the router ends the reservation
            else:
                job.steps.put_nowait(progress)

    def _step_done(self, key: str, done: Found | ChunkDone) -> None:
        job = self._jobs.get(key)
        if job is not None:
            job.steps.put_nowait(done)

    async def _push(self, job: Job) -> None:
        """Send blocks as chunks complete them, then the rest, the state, and COMMIT."""
        try:
            decode = job.decode = await self._decode_link(job.decode_address, job.decode_epoch)
            where = ChunkDone(0, (), 0)
            while not isinstance(step := await job.steps.get(), Progress):
                if isinstance(step, Found):
                    self._have_loaded(job, decode, step)
                    continue
                where = step
                full = where.num_tokens // self.runner.layout.block_tokens
                job.sent_since = job.sent_since or time.monotonic()
                await self.units.send(decode, job.out.blocks(where.blocks, full))
            job.sent_since = job.sent_since or time.monotonic()
            await self.units.send(decode, job.out.blocks(where.blocks, len(where.blocks)))
            if job.loaded is not None:
                left = job.out.between(where.blocks, await job.loaded, job.loading)
                await self.units.send(decode, left)
            await self.units.send(decode, job.out.state(where.state_slot))
            await self._published()
            decode.send(FrameType.COMMIT, commit_body(job, step))
            job.committed_at = time.monotonic()
            job.lease_until = job.committed_at + LEASE_S
            await decode.drain()
        except (OSError, TransferError, TimeoutError) as error:
            self._lost_decode(job, error)
        except Exception as error:
            log.exception("sending the prompt of %s failed", job.xid.key)
            self._fail(job, "engine", f"sending the prompt failed: {error}")

    def _found(self, seq: LiveSequence, prefix: Prefix) -> None:
        """From a loading thread, before any chunk of this prompt runs."""
        if self.loads_stored and prefix.n_tokens:
            found = Found(tuple(seq.tokens[: prefix.n_tokens]), prefix.generation)
            self.post(self._step_done, seq.key, found)

    def _have_loaded(self, job: Job, decode: Connection, found: Found) -> None:
        """A prompt that is computed again may be found again: what was sent stays sent."""
        store = "" if self.connector is None else self.connector.shared_as
        if not store or decode.hello.get("store") != store:
            return
        if job.loaded is None and not job.out.units:
            job.loading = len(found.tokens) // self.runner.layout.block_tokens
            job.out.blocks_made = job.loading
            job.loaded = asyncio.get_running_loop().create_future()
            body = {"tokens": pack_tokens(found.tokens), "generation": found.generation}
            decode.send(FrameType.STORED, {**xid_body(job.xid), **body})

    def _loaded(self, job: Job, blocks: int) -> None:
        if job.loaded is None or job.loaded.done() or blocks > job.loading:
            self._fail(job, "protocol", f"{blocks} blocks were loaded of {job.loading}")
        else:
            job.loaded.set_result(blocks)

    def _observe(self, job: Job, now: float) -> None:
        """Decode has everything: from the first byte that left, and from the last of the prompt."""
        if job.sent_since is not None:
            self._transferred.observe(now - job.sent_since)
        if job.committed_at is not None:
            self._handed_over.observe(now - job.committed_at)

    async def _published(self) -> None:
        """Wait until the prompt's blocks can be found: the next turn may come at once."""
        if self.connector is None:
            return
        done = asyncio.Event()
        self.connector.after_publications(lambda: self.post(done.set))
        await done.wait()

    def _resend(self, job: Job, unit: int) -> None:
        if job.decode is None or not 0 <= unit < len(job.out.units) or unit in job.resent:
            self._fail(job, "protocol", f"unit {unit} cannot be sent again")
            return
        job.resent.add(unit)
        self._resends += 1
        # Over the socket, whichever way it came: a frame has a checksum of its own on the way.
        job.decode.send_unit(job.out.units[unit].header, job.out.units[unit].views)

    # -- links to decode workers ----------------------------------------------------------------

    async def _decode_link(self, address: str, epoch: int) -> Connection:
        """The one connection to a decode worker, made when first needed."""
        task = self._decodes.get(address)
        if task is None or (task.done() and (task.exception() or task.result().closed)):
            task = asyncio.get_running_loop().create_task(self._connect(address))
            self._decodes[address] = task
        # Shielded: the abort of one request must not end the link that others share.
        link = await asyncio.shield(task)
        if link.hello.get("epoch") != epoch:
            raise TransferError("the decode worker has been restarted since the reservation")
        return link

    async def _connect(self, address: str) -> Connection:
        try:
            link = await transport.connect(address, self.hello(), self.cluster_key)
        except ConfigError as error:
            raise TransferError(str(error)) from None
        if link.hello.get("layout_hash") != self.runner.layout.layout_hash:
            link.close()
            raise TransferError("prefill and decode workers run different cache layouts")
        self.spawn(self.serve_peer(link))
        await self.units.share(link)
        return link

    async def _probe(self, router: Connection, body: Body) -> None:
        """Send a decode worker bytes as a transfer would, and tell what became of them."""
        detail = ""
        number, data = next(self._ping_ids), secrets.token_bytes(PROBE_BYTES)
        try:
            async with asyncio.timeout(PROBE_S):
                link = await self._decode_link(body["address"], body["epoch"])
                pong = self._pongs[number] = asyncio.get_running_loop().create_future()
                link.send(FrameType.PING, {"id": number, "data": data})
                if await pong != wire.unit_digest([memoryview(data)]):
                    detail = "bytes arrive changed"
        except TimeoutError:
            detail = f"no answer in {PROBE_S:g} s"
        except (OSError, TransferError) as error:
            detail = quoted(error) or type(error).__name__
        finally:
            self._pongs.pop(number, None)
        router.send(FrameType.PROBED, {"id": body["id"], "detail": detail})

    # -- ends -----------------------------------------------------------------------------------

    def _fail(
        self,
        job: Job,
        reason: str,
        message: str,
        *,
        body: Body | None = None,
        tell_decode: bool = True,
    ) -> None:
        """End a job here and tell both ends. Its memory goes when no step uses it."""
        body = body or abort_body(job.xid, reason, message)
        job.router.send(FrameType.ABORT, body)
        if tell_decode and job.decode is not None:
            job.decode.send(FrameType.ABORT, body)
        self._forget(job)
        self.loop.abort(job.xid.key)

    def _forget(self, job: Job) -> None:
        self._stop_pushing(job)
        self._jobs.pop(job.xid.key, None)

    def _stop_pushing(self, job: Job) -> None:
        if self.pictures is not None:
            self.pictures.forget(job.xid.key)
        for task in (job.asking, job.pusher):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def peer_lost(self, peer: Connection) -> None:
        super().peer_lost(peer)
        self.units.lost(peer)
        self._pixels = {key: p for key, p in self._pixels.items() if p.router is not peer}
        for job in list(self._jobs.values()):
            if job.router is peer:
                self._forget(job)
                self.loop.abort(job.xid.key)
            elif job.decode is peer:
                text = "the decode worker went away"
                body = {**abort_body(job.xid, "decode_lost", text), "blame": "decode"}
                self._fail(job, "", "", body=body, tell_decode=False)

    def reap(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if job.lease_until is not None and now > job.lease_until:
                text = f"the decode worker said nothing for {LEASE_S} s"
                self._fail(
                    job, "", "", body={**abort_body(job.xid, "lease", text), "blame": "decode"}
                )

    def unfinished(self) -> int:
        return len(self._jobs)

    def extra_gauges(self) -> dict[str, float]:
        return {} if self.pictures is None else self.pictures.gauges()

    def extra_counters(self) -> dict[str, float]:
        return {
            **self.units.counters,
            "transfer_resends": self._resends,
            **({} if self.pictures is None else self.pictures.counters()),
            **self._transferred.counters(),
            **self._handed_over.counters(),
        }
