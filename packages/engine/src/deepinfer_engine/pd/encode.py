"""The encode worker: the vision tower of a model, asked by prefill workers.

    prefill                                  encode
    ENCODE(digest, version, grant) ────────►  cached? its rows are sent
                     ◄──────── PIXELS_WANTED  else the pixels are asked for,
    PICTURE_PIXELS ... ────────────────────►  of the first who asks for this picture
           ◄──────── UNIT ..., EMBEDDED       one pass for all who do

An attempt that is aborted leaves every queue here. NOT_EMBEDDED says why there will be no rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer_engine.core.pictures import Picture, RowForm, picture_digest
from deepinfer_engine.errors import ConfigError, RequestError, TransferError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.announcing import Announcing
from deepinfer_engine.pd.encode_queue import PATCHES, EncodeQueue, Encoder, Waiting
from deepinfer_engine.pd.messages import xid_body
from deepinfer_engine.pd.peers import ModelIdentity, PeerService, xid_of
from deepinfer_engine.pd.rings import OF_RINGS, UnitSender
from deepinfer_engine.pd.rows import RowCache, row_units
from deepinfer_engine.pd.transport import Connection, Frame
from deepinfer_engine.pd.wire import Body, FrameType, Xid

log = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20
PIXEL_BYTES = 512 << 20
"""Of all pictures that are being received, wait or are encoded."""
KEY_SHARE = 0.5
"""Of these, one key's at most."""
MAX_ASKS = 4096
"""Pictures that one prefill worker may wait for."""


@dataclass(eq=False, slots=True)
class Ask:
    """One prefill worker waits for one picture."""

    peer: Connection
    xid: Xid
    grant_id: int

    @property
    def body(self) -> Body:
        return {**xid_body(self.xid), "grant_id": self.grant_id}


@dataclass(eq=False, slots=True)
class Work:
    """A picture that is not cached, and all who wait for it."""

    picture: Picture
    key: str
    alone: bool
    asks: list[Ask] = field(default_factory=list[Ask])
    """The first sends the pixels."""
    pixels: bytearray = field(default_factory=bytearray)
    queued: Waiting | None = None
    """Set when the pixels are whole."""

    @property
    def nbytes(self) -> int:
        return 3 * self.picture.width * self.picture.height


async def serve_encode(
    encoder: Encoder,
    listen: str,
    *,
    cluster_key: bytes | None = None,
    identity: ModelIdentity | None = None,
    looked: Callable[[str], None] = lambda trouble: None,
    announcing: Announcing | None = None,
    shares_memory: bool = True,
    cache_bytes: int = CACHE_BYTES,
    patches: int = PATCHES,
    ready: Callable[[str], None] = lambda address: None,
    stop: asyncio.Event | None = None,
    drain_timeout_s: float = 120.0,
) -> None:
    """Serve pictures' embeddings on `listen` ("host:port", port 0 = any) until SIGTERM, SIGINT or
    `stop`; drain.

    Calls `ready("host:port")` once with the bound address. Raises ConfigError for an unusable
    address, or a non-loopback one without `cluster_key`. `looked` hears twice a second, from a
    thread of its own, why no pass ends. `announcing`: routers that are told that this worker is
    there. `shares_memory`: whether units to prefill workers of this machine go through shared
    memory. `cache_bytes`: embeddings kept. `patches`: of the pictures of one pass.
    """
    service = EncodeService(
        encoder, cluster_key, identity=identity, cache_bytes=cache_bytes, patches=patches
    )
    service.on_look = looked
    service.announcing = announcing
    service.units.shares_memory = shares_memory
    await service.serve(listen, ready=ready, stop=stop, drain_timeout_s=drain_timeout_s)


class EncodeService(PeerService):
    """Everything here runs on the event loop; passes run in the step thread."""

    def __init__(
        self,
        encoder: Encoder,
        cluster_key: bytes | None,
        *,
        identity: ModelIdentity | None = None,
        cache_bytes: int = CACHE_BYTES,
        pixel_bytes: int = PIXEL_BYTES,
        patches: int = PATCHES,
    ) -> None:
        super().__init__("encode", cluster_key, identity)
        rules = encoder.rules
        self.form = RowForm(rules, self.identity.dtype or "float32", self.identity.model)
        if not self.form.row_bytes:
            raise ConfigError("this family does not say how wide its embeddings are")
        self.cache = RowCache(cache_bytes)
        self._pixel_bytes = pixel_bytes
        self.queue = EncodeQueue(
            encoder,
            done=lambda waiting, rows: self.post(self._done, waiting, rows),
            failed=lambda waiting, text: self.post(self._failed, waiting, text),
            patches=patches,
        )
        self.step_with(self.queue)
        self.units = UnitSender()
        self._works: dict[bytes, Work] = {}
        self._of_waiting: dict[Waiting, Work] = {}
        """Those whose pixels are whole."""
        self._sending: dict[asyncio.Task[None], Ask] = {}
        self._counters = {"pictures_asked": 0, "pixel_bytes": 0, "embedded": 0, "refused": 0}

    def handle(self, peer: Connection, kind: FrameType, frame: Frame) -> None:
        role = peer.hello.get("role")
        if kind in OF_RINGS and role == "prefill":
            self.units.hear(peer, kind, frame.body())
            return
        xid, body = xid_of(frame)
        match kind:
            case FrameType.ENCODE if role == "prefill":
                self._encode(Ask(peer, xid, body["grant_id"]), body)
            case FrameType.PICTURE_PIXELS if role == "prefill":
                self._collect(peer, xid, body)
            case FrameType.ABORT if role == "prefill":
                self._leave(lambda ask: ask.peer is peer and ask.xid == xid)
                peer.send(FrameType.ABORT_ACK, xid_body(xid))
            case FrameType.GONE | FrameType.ABORT_ACK:
                pass
            case _:
                raise TransferError(f"a {role} peer may not send {kind.name} to an encode worker")

    # -- a picture is asked for -----------------------------------------------------------------

    def _encode(self, ask: Ask, body: Body) -> None:
        """What it would cost is known, and may be, before any of it is paid."""
        self._counters["pictures_asked"] += 1
        if body["epoch"] != self.epoch:
            return self._refuse(ask, "stale", "the encode worker has been restarted")
        if self.draining:
            return self._refuse(ask, "draining", "the encode worker is draining")
        if body["version"] != self.form.version:
            text = "prefill has another checkpoint, dtype or preprocessing than the encode worker"
            return self._refuse(ask, "version", text)
        width, height, tokens = body["width"], body["height"], body["tokens"]
        try:
            self.form.rules.check_size(0, width, height, tokens)
        except RequestError as error:
            return self._refuse(ask, "request", str(error))
        if self._asked_by(ask.peer) >= MAX_ASKS:
            return self._refuse(ask, "busy", f"{MAX_ASKS} pictures of this prefill worker wait")
        digest = body["digest"]
        rows = self.cache.get(digest)
        if rows is not None:
            return self._answer(ask, digest, rows, cached=True)
        work = self._works.get(digest)
        if work is None:
            key = body["salt"].partition("/")[0]
            picture = Picture(0, tokens, width, height, digest, b"")
            work = Work(picture, key, body["alone"])
            if not self._has_room(work):
                return self._refuse(ask, "busy", "too many pictures wait here")
            self._works[digest] = work
        if (work.picture.width, work.picture.height) != (width, height):
            return self._refuse(ask, "request", "the digest is that of a picture of another size")
        work.asks.append(ask)
        if len(work.asks) == 1 and work.queued is None:
            ask.peer.send(FrameType.PIXELS_WANTED, ask.body)
        return None

    def _has_room(self, work: Work) -> bool:
        """Whether its pixels fit beside all others, and beside those of its key."""
        total = sum(one.nbytes for one in self._works.values())
        own = sum(one.nbytes for one in self._works.values() if one.key == work.key)
        share = KEY_SHARE * self._pixel_bytes if total else self._pixel_bytes
        return total + work.nbytes <= self._pixel_bytes and own + work.nbytes <= share

    def _asked_by(self, peer: Connection) -> int:
        waiting = sum(ask.peer is peer for work in self._works.values() for ask in work.asks)
        return waiting + sum(ask.peer is peer for ask in self._sending.values())

    def _collect(self, peer: Connection, xid: Xid, body: Body) -> None:
        work = next(
            (
                one
                for one in self._works.values()
                if one.queued is None
                and (first := one.asks[0]).peer is peer
                and (first.xid, first.grant_id) == (xid, body["grant_id"])
            ),
            None,
        )
        if work is None:
            return  # aborted while they were on their way
        data = body["data"]
        self._counters["pixel_bytes"] += len(data)
        if len(work.pixels) + len(data) > work.nbytes:
            return self._bad_pixels(work, "more pixels than the picture has")
        work.pixels += data
        if len(work.pixels) < work.nbytes:
            return None
        given = work.picture
        pixels = bytes(work.pixels)
        if picture_digest(given.width, given.height, pixels) != given.digest:
            return self._bad_pixels(work, "the pixels are not those of the digest")
        whole = Picture(0, given.length, given.width, given.height, given.digest, pixels)
        work.pixels = bytearray()
        work.queued = Waiting(whole, work.key, work.alone)
        self._of_waiting[work.queued] = work
        self.queue.put(work.queued)
        return None

    def _bad_pixels(self, work: Work, text: str) -> None:
        """The fault of who sent them; the next who waits may have better ones."""
        self._refuse(work.asks.pop(0), "request", text)
        self._restart(work)

    def _restart(self, work: Work) -> None:
        """The one that sent pixels is out."""
        work.pixels.clear()
        if work.asks:
            work.asks[0].peer.send(FrameType.PIXELS_WANTED, work.asks[0].body)
        else:
            del self._works[work.picture.digest]

    # -- it is encoded --------------------------------------------------------------------------

    def _done(self, waiting: Waiting, rows: memoryview) -> None:
        work = self._of_waiting.pop(waiting)
        digest = work.picture.digest
        if len(rows) != work.picture.length * self.form.row_bytes:
            self._end(work, "failed", f"the tower gave {len(rows)} bytes")
            return
        self.cache.put(digest, rows)
        del self._works[digest]
        for ask in work.asks:
            self._answer(ask, digest, rows, cached=False)

    def _failed(self, waiting: Waiting, text: str) -> None:
        self._end(self._of_waiting.pop(waiting), "failed", text)

    def _end(self, work: Work, reason: str, text: str) -> None:
        del self._works[work.picture.digest]
        for ask in work.asks:
            self._refuse(ask, reason, text)

    def _refuse(self, ask: Ask, reason: str, text: str) -> None:
        self._counters["refused"] += 1
        ask.peer.send(FrameType.NOT_EMBEDDED, {**ask.body, "reason": reason, "message": text})

    def _answer(self, ask: Ask, digest: bytes, rows: memoryview, *, cached: bool) -> None:
        task = self.spawn(self._send(ask, rows, cached=cached))
        self._sending[task] = ask
        task.add_done_callback(lambda task: self._sending.pop(task, None))

    async def _send(self, ask: Ask, rows: memoryview, *, cached: bool) -> None:
        tokens = len(rows) // self.form.row_bytes
        units, combined = 0, 0
        try:
            for unit in row_units(ask.grant_id, ask.xid.attempt, tokens, rows):
                await self.units.send(ask.peer, [unit])
                units += 1
                combined = wire.add_to_combined(combined, unit.header.unit, unit.header.digest)
            body = {
                **ask.body,
                "n_units": units,
                "digest": combined,
                "dtype": self.form.dtype,
                "rows": tokens,
                "channels": self.form.rules.channels,
                "cached": cached,
            }
            ask.peer.send(FrameType.EMBEDDED, body)
            self._counters["embedded"] += 1
            await ask.peer.drain()
        except OSError:
            pass  # prefill is gone: nobody waits for it

    # -- ends -----------------------------------------------------------------------------------

    def _leave(self, left: Callable[[Ask], bool]) -> None:
        """Those who ask no more leave every queue; what only they wanted is not begun."""
        for task, ask in list(self._sending.items()):
            if left(ask):
                task.cancel()
        for work in list(self._works.values()):
            sends = bool(work.asks) and left(work.asks[0]) and work.queued is None
            work.asks = [ask for ask in work.asks if not left(ask)]
            if sends:
                self._restart(work)
            elif not work.asks:
                self._drop(work)

    def _drop(self, work: Work) -> None:
        """Nobody wants it; a pass that has begun with it goes on, and its rows are kept."""
        if work.queued is not None:
            if not self.queue.drop(work.queued):
                return
            del self._of_waiting[work.queued]
        del self._works[work.picture.digest]

    def peer_joined(self, peer: Connection) -> None:
        if peer.hello.get("role") == "prefill":
            self.spawn(self.units.share(peer))

    def peer_lost(self, peer: Connection) -> None:
        self.units.lost(peer)
        self._leave(lambda ask: ask.peer is peer)

    def beats_to(self, peer: Connection) -> bool:
        return peer.hello.get("role") in ("router", "prefill")

    def reap(self, now: float) -> None:
        """Nothing outlives its prefill worker's connection."""

    def serving(self) -> None:
        """Nothing to follow."""

    async def flush(self) -> None:
        """Nothing here is durable."""

    async def close(self) -> None:
        """Nothing to close."""

    def unfinished(self) -> int:
        return sum(len(work.asks) for work in self._works.values()) + len(self._sending)

    def load(self) -> tuple[dict[str, float], dict[str, float]]:
        counters: dict[str, float] = {
            **{f"encode_{name}": value for name, value in self._counters.items()},
            "encode_cache_hits": self.cache.hits,
            "encode_cache_misses": self.cache.misses,
            "encode_passes": self.queue.passes,
            "encode_pictures": self.queue.encoded,
            "encode_failures": self.queue.failures,
            **self.units.counters,
        }
        gauges: dict[str, float] = {
            "encode_waiting": self.queue.waiting,
            "encode_running": self.queue.running,
            "encode_asks": self.unfinished(),
            "encode_cache_bytes": self.cache.nbytes,
            "encode_pixel_bytes_held": sum(work.nbytes for work in self._works.values()),
        }
        return counters, gauges
