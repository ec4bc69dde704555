"""The router's connection to one worker: kept up with backoff, its loss told to its streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

from deepinfer_engine import __version__
from deepinfer_engine.core.block_hashes import CacheTier, unpack_hashes
from deepinfer_engine.errors import EngineError, EngineUnavailable, TransferError
from deepinfer_engine.pd import transport
from deepinfer_engine.pd.messages import read_xid, reading, xid_body
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.schema import BadMessage
from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.pd.wire import Body, FrameType, Xid
from deepinfer_engine.router.breaker import Breaker
from deepinfer_engine.router.changes import Changes
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.router.index import PrefixIndex
from deepinfer_engine.router.work import Work

log = logging.getLogger(__name__)

KNOWN = frozenset(FrameType)
TIERS: tuple[CacheTier, ...] = ("memory", "below")

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
SILENT_S = 15.0
"""A worker that has not even sent a heartbeat for this long is treated as lost."""
FLUSH_TIMEOUT_S = 60.0
REFUSALS = 2
"""Connections refused in a row after which nothing is thought to listen there."""
PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Mail:
    """A message for one request. `kind` None: the worker is lost; `move`: it is to be emptied, and
    another can go on with the request."""

    link: WorkerLink
    kind: FrameType | Literal["move"] | None
    body: Body


Mailbox = asyncio.Queue[Mail]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself in HELLO."""

    epoch: int
    pid: int
    layout_hash: str
    block_tokens: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    nextn: int
    version: str
    model: str | None
    dtype: str | None
    store: str = ""
    """Equal for workers whose caches read what each other wrote."""
    windows: str = ""
    """Where others pull its window states; empty: nowhere."""
    encoding: str | None = None
    """Of a prefill worker: who encodes its pictures."""

    @classmethod
    def read(cls, hello: Body) -> WorkerInfo:
        """An encode worker has no cache, and says nothing of one."""
        if hello["role"] == "encode":
            of_cache = ("block_tokens", "num_blocks", "max_model_len", "vocab_size", "nextn")
            hello = {"layout_hash": "", **dict.fromkeys(of_cache, 0), **hello}
        return cls(
            layout_hash=str(hello["layout_hash"]),
            encoding=hello.get("encoding"),
            version=hello["version"],
            model=hello.get("model"),
            dtype=hello.get("dtype"),
            store=str(hello.get("store", "")),
            windows=str(hello.get("windows", "")),
            **{
                name: int(hello[name])
                for name in (
                    "epoch",
                    "pid",
                    "block_tokens",
                    "num_blocks",
                    "max_model_len",
                    "vocab_size",
                    "nextn",
                )
            },
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when nothing else is there."""
        return (self.num_blocks - 1) * self.block_tokens


@dataclass(eq=False, slots=True)
class WorkerLink:
    """One worker by address; `run` keeps the connection until `close`."""

    address: str
    role: str
    cluster_key: bytes | None
    changed: Changes
    """Set whenever a worker came or went."""
    load: float = 0.0
    requests: int = 0
    """Attempts given to this worker, and how many of them it failed or refused."""
    failures: int = 0
    migrations: int = 0
    """Streams that it lost and that went on elsewhere."""
    connection: Connection | None = None
    info: WorkerInfo | None = None
    """Of the present connection, or of the last one."""
    trouble: str = "not connected yet"
    draining: bool = False
    leaving: bool = False
    """It is no member of the fleet any more: what it runs may end."""
    refusals: int = 0
    """Connections refused since the last one that was made."""
    stuck: str = ""
    """What the worker says keeps it from stepping."""
    start_trouble: str = ""
    """Why its process cannot be started, where this router's own supervisor tries."""
    breaker: Breaker = field(default_factory=Breaker)
    counters: dict[str, float] = field(default_factory=dict[str, float])
    gauges: dict[str, float] = field(default_factory=dict[str, float])
    work: Work = field(default_factory=Work)
    """Of a prefill worker."""
    index: PrefixIndex | None = None
    """Where what it says of its cache goes."""
    _beats: int = 0
    """Reports heard."""
    _since: float = 0.0
    """Load given, and not got back, since the last one."""
    _given: int = 0
    """Attempts likewise."""
    _told: int = 0
    """Number of its last message about that."""
    _streams: dict[str, Mailbox] = field(default_factory=dict[str, Mailbox])
    _flushes: dict[int, asyncio.Future[None]] = field(
        default_factory=dict[int, "asyncio.Future[None]"]
    )
    _probes: dict[int, asyncio.Future[str]] = field(
        default_factory=dict[int, "asyncio.Future[str]"]
    )
    _ids: int = 0
    _heard: bool = True
    """Whether anything came since the timer looked."""
    _task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        away = self.draining or self.leaving or self.stuck
        return self.connection is not None and not away

    @property
    def held(self) -> float:
        """Tokens in its memory: what it said last, whoever gave it that, and what it was given
        since; at least what this router has there."""
        size = 0 if self.info is None else self.info.block_tokens
        said = self.gauges.get("blocks_owned", 0.0) * size
        return max(self.load, said + self._since if self.gauges else 0.0)

    @property
    def late(self) -> bool:
        """Whether one more sequence would make its tokens take longer than their target; never
        where it has none."""
        room = self.gauges.get("token_room")
        return room is not None and room - self._given < 1

    @property
    def capacity(self) -> float:
        """Tokens that fit when nothing else is there; without end where it has not said."""
        return math.inf if self.info is None else float(self.info.capacity_tokens)

    @property
    def running(self) -> int:
        """Attempts of this router that the worker has now."""
        return len(self._streams)

    @property
    def gone(self) -> bool:
        """Whether nothing seems to listen at its address."""
        return self.connection is None and self.refusals >= REFUSALS

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def retire(self) -> None:
        """Close it, which is leaving, when what it runs for this router has ended or the worker
        is lost."""
        self.changed.set()
        while self._streams and self.connection is not None:
            await self.changed.wait()
        await self.close()

    def ask_to_drain(self, on: bool) -> None:
        """Have the worker take nothing new, from any router; or take requests again."""
        self.send(FrameType.DRAIN, {"on": on})
        self.draining = on  # its next report says so, too
        self.changed.set()

    def move_streams(self) -> None:
        """Have what it runs for this router go on elsewhere."""
        for mailbox in self._streams.values():
            mailbox.put_nowait(Mail(self, "move", {}))

    def send(self, kind: FrameType, body: Body) -> None:
        if self.connection is not None:
            self.connection.send(kind, body)

    async def drain(self) -> None:
        """Wait until little is unsent. A lost connection is told by mail, not here."""
        if self.connection is not None:
            with contextlib.suppress(ConnectionResetError):
                await self.connection.drain()

    @contextlib.contextmanager
    def stream(self, xid: Xid, mailbox: Mailbox, load: float) -> Generator[None]:
        """Deliver this attempt's messages to `mailbox`, and count its load, until left."""
        self._streams[xid.key] = mailbox
        self.load += load
        self._since += load
        self._given += 1
        beats = self._beats
        self.requests += 1
        try:
            yield
        finally:
            self.load -= load
            if beats == self._beats:
                self._since -= load
                self._given -= 1
            del self._streams[xid.key]
            if self.leaving:
                self.changed.set()

    async def flush(self) -> None:
        """Raises EngineUnavailable when the worker goes or does not answer."""
        if self.connection is None:
            return  # it has nothing left that could be lost
        self._ids += 1
        number = self._ids
        future = self._flushes[number] = asyncio.get_running_loop().create_future()
        self.send(FrameType.FLUSH, {"id": number})
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await future
        except TimeoutError:
            raise EngineUnavailable(f"{self.role} worker {self.address} did not flush") from None
        finally:
            del self._flushes[number]

    async def probe(self, address: str, epoch: int) -> str:
        """Of a prefill worker: what keeps it from sending to a decode worker; empty: nothing."""
        self._ids += 1
        number = self._ids
        future = self._probes[number] = asyncio.get_running_loop().create_future()
        self.send(FrameType.PROBE, {"id": number, "address": address, "epoch": epoch})
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await future
        except TimeoutError:
            return f"prefill worker {self.address} does not answer"
        except EngineUnavailable as error:
            return str(error)
        finally:
            del self._probes[number]

    def status(self) -> WorkerStatus:
        state = "leaving" if self.leaving else "draining" if self.draining else ""
        detail = state or self.stuck or self.trouble
        if self.connection is None and self.start_trouble:
            detail = f"{detail}; {self.start_trouble}"
        return WorkerStatus(
            name=self.address,
            role=self.role,
            ready=self.ready,
            detail="" if self.ready else detail,
            pid=self.info.pid if self.info and self.connection is not None else None,
            epoch=self.info.epoch if self.info else 0,
            draining=self.draining or self.leaving,
            running=self.running,
            counters={
                **self.counters,
                "router_requests": self.requests,
                "router_failures": self.failures,
                "router_migrations": self.migrations,
            },
            gauges={
                **self.gauges,
                "router_load_tokens": self.load,
                "router_queue_seconds": self.work.queue_ms / 1000,
                "router_breaker_open": float(self.breaker.state != "closed"),
            },
        )

    async def _run(self) -> None:
        backoff = BACKOFF_FIRST_S
        hello: Body = {
            "role": "router",
            "engine_id": f"router-{id(self):x}",
            "epoch": time.time_ns(),
            "version": __version__,
        }
        while True:
            try:
                connection = await transport.connect(self.address, hello, self.cluster_key)
                info = self._identify(connection)
            except (OSError, TransferError, TimeoutError, EngineError) as error:
                self.refusals += isinstance(error, ConnectionRefusedError)
                if self.gone:
                    self.changed.set()
                self.trouble = f"cannot connect: {quoted(error) or type(error).__name__}"
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, BACKOFF_MAX_S)
                continue
            backoff = BACKOFF_FIRST_S
            self._up(connection, info)
            try:
                await self._receive(connection)
            except TransferError as error:
                log.warning("%s worker %s: %s", self.role, self.address, quoted(error))
            finally:
                self._down(connection)

    def _identify(self, connection: Connection) -> WorkerInfo:
        role = connection.hello.get("role")
        try:
            if role == self.role:
                return reading(WorkerInfo.read, connection.hello)
        except TransferError:
            connection.close()
            raise
        connection.close()
        raise TransferError(f"it is a {quoted(role)} worker, not a {self.role} worker")

    async def _receive(self, connection: Connection) -> None:
        listening = asyncio.create_task(self._close_when_silent(connection))
        try:
            await self._receive_all(connection)
        finally:
            listening.cancel()

    async def _close_when_silent(self, connection: Connection) -> None:
        """A timer beside the frames, for there are thousands of those a second."""
        self._heard = True
        while self._heard:
            self._heard = False
            await asyncio.sleep(SILENT_S)
        log.warning("%s worker %s: silent for %.0f s", self.role, self.address, SILENT_S)
        connection.close()

    async def _receive_all(self, connection: Connection) -> None:
        while True:
            frame = await connection.receive()
            if frame is None:
                return
            self._heard = True
            if frame.type in KNOWN:
                try:
                    body = frame.body()
                except BadMessage as error:
                    if error.xid is None:
                        raise
                    # It fails its own request; others go on over this connection.
                    text = {"reason": "protocol", "message": str(error), "blame": self.role}
                    self._deliver(FrameType.ABORT, {**xid_body(error.xid), **text})
                    continue
                reading(functools.partial(self._deliver, FrameType(frame.type)), body)

    def _deliver(self, kind: FrameType, body: Body) -> None:
        match kind:
            case FrameType.HEARTBEAT:
                self.counters, self.gauges = dict(body["counters"]), dict(body["gauges"])
                self.draining, self.stuck = body["draining"], body["trouble"]
                self._reported()
            case FrameType.CACHE:
                self._cached(body)
            case FrameType.FLUSHED:
                future = self._flushes.get(int(body["id"]))
                if future is not None and not future.done():
                    future.set_result(None)
            case FrameType.PROBED:
                probe = self._probes.get(body["id"])
                if probe is not None and not probe.done():
                    probe.set_result(body["detail"])
            case _:
                mailbox = self._streams.get(read_xid(body).key)
                if mailbox is not None:
                    mailbox.put_nowait(Mail(self, kind, body))

    def _reported(self) -> None:
        self._beats += 1
        self._since, self._given = 0.0, 0
        self.changed.set()

    def _cached(self, body: Body) -> None:
        if self.index is None:
            return
        number, missed = body["number"], body["number"] != self._told + 1
        self._told = number
        if missed and not body["whole"]:
            # What was true once is not known to be: until it has told all, it holds nothing.
            self.index.clear(self)
            self.send(FrameType.CACHE_WANTED, {})
            return
        if body["whole"]:
            self.index.clear(self)
        for tier in TIERS:
            self.index.stored(self, tier, unpack_hashes(body[tier]))
            self.index.removed(self, tier, unpack_hashes(body[f"no_{tier}"]))

    def _up(self, connection: Connection, info: WorkerInfo) -> None:
        if self.info is not None and self.info.epoch != info.epoch:
            self.breaker.reset()
        if self.index is not None:
            self.index.join(self, info.store)
        self._told = 0
        self.connection, self.info = connection, info
        self.draining, self.trouble, self.stuck, self.refusals = False, "", "", 0
        self.counters, self.gauges = {}, {}
        self._reported()

    def _down(self, connection: Connection) -> None:
        connection.close()
        if self.index is not None:
            self.index.leave(self)
        self.connection, self.trouble = None, "connection lost"
        self.changed.set()
        for mailbox in self._streams.values():
            mailbox.put_nowait(Mail(self, None, {}))
        for probe in self._probes.values():
            if not probe.done():
                probe.set_exception(EngineUnavailable(f"worker {self.address} went away"))
        for future in self._flushes.values():
            if not future.done():
                future.set_exception(EngineUnavailable(f"worker {self.address} went away"))
