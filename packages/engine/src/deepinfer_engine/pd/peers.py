"""What every worker has in common: sockets, handshakes, heartbeats, a step thread, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from deepinfer_engine import __version__
from deepinfer_engine.errors import ConfigError, EngineLost, TransferError
from deepinfer_engine.pd import transport
from deepinfer_engine.pd.announcing import Announcer, Announcing, WorkerRole
from deepinfer_engine.pd.mailbox import Mailbox
from deepinfer_engine.pd.messages import read_xid, reading, xid_body
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.schema import BadMessage
from deepinfer_engine.pd.step_thread import Steps, StepThread
from deepinfer_engine.pd.transport import Connection, Frame
from deepinfer_engine.pd.wire import Body, FrameType, Xid

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_HANDSHAKES = 64
"""Connections that have not said who they are. The oldest goes when another comes: a real peer
needs milliseconds."""
_QUIET_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What must be equal beside the cache layout for workers to serve one request together."""

    model: str | None = None
    """A digest of the checkpoint."""
    dtype: str | None = None


class QuietLog:
    """Warnings that strangers cause: one in a while, with how many were left out."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._told = float("-inf")
        self._skipped = 0

    def warn(self, text: str, *values: object) -> None:
        now = self._clock()
        if now - self._told < self._seconds:
            self._skipped += 1
            return
        more = f" (and {self._skipped} more since the last line)" if self._skipped else ""
        log.warning(text + more, *values)
        self._told, self._skipped = now, 0


class PeerService(ABC):
    """One worker process. Sockets live on the event loop, steps in a thread of their own.

    Subclasses handle frames; every handler runs on the event loop and returns at once.
    """

    def __init__(
        self, role: WorkerRole, cluster_key: bytes | None, identity: ModelIdentity | None = None
    ) -> None:
        """`identity`: what peers compare. A subclass calls `step_with` before it serves."""
        self.identity = identity or ModelIdentity()
        self.role: WorkerRole = role
        self.cluster_key = cluster_key
        self.epoch = time.time_ns()
        """Names this run of the worker: a restarted one is another."""
        self.engine_id = f"{role}-{os.getpid()}-{secrets.token_hex(4)}"
        self._told_to_drain = False
        self.announcing: Announcing | None = None
        """Set before `serve`: the routers that this worker tells that it is there."""
        self.peers: set[Connection] = set()
        self._events: asyncio.AbstractEventLoop | None = None
        self._mailbox: Mailbox | None = None
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None
        self.on_look: Callable[[str], None] = lambda trouble: None
        """Hears twice a second, from a thread of its own, what keeps steps from ending."""
        self._handshakes: list[Connection] = []
        self._refusals = QuietLog(_QUIET_S)

    def step_with(self, steps: Steps, helpers_cpu_s: Callable[[], float] = lambda: 0.0) -> None:
        """What the step thread runs while this serves."""
        self._thread = StepThread(
            steps, failed=self.step_failed, looked=self._looked, helpers_cpu_s=helpers_cpu_s
        )

    # -- what the roles add ---------------------------------------------------------------------

    @abstractmethod
    def handle(self, peer: Connection, kind: FrameType, frame: Frame) -> None:
        """One frame of an authenticated peer. TransferError closes the connection."""

    @abstractmethod
    def peer_lost(self, peer: Connection) -> None: ...

    @abstractmethod
    def reap(self, now: float) -> None:
        """End what no peer will end any more; called about once a second from its own timer."""

    @abstractmethod
    def unfinished(self) -> int:
        """Requests this worker still owes something to."""

    @abstractmethod
    def load(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters, which only grow, and gauges of now."""

    def hello(self) -> Body:
        """What this worker says of itself."""
        return {
            "engine_id": self.engine_id,
            "epoch": self.epoch,
            "role": self.role,
            "version": __version__,
            "pid": os.getpid(),
            "model": self.identity.model,
            "dtype": self.identity.dtype,
        }

    @abstractmethod
    def peer_joined(self, peer: Connection) -> None:
        """It is authenticated, and has been sent nothing yet."""

    @abstractmethod
    def serving(self) -> None:
        """The address is bound; peers may come from now on."""

    @abstractmethod
    async def flush(self) -> None:
        """Make durable what was published."""

    @abstractmethod
    async def close(self) -> None:
        """After the last step."""

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new: it ends, or a router said so."""
        return self._told_to_drain or self._stop.is_set()

    # -- life -----------------------------------------------------------------------------------

    async def serve(
        self,
        listen: str,
        *,
        ready: Callable[[str], None],
        stop: asyncio.Event | None,
        drain_timeout_s: float,
    ) -> None:
        host, port = transport.parse_address(listen)
        transport.check_key(host, self.cluster_key)
        self._events = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._events)
        self._stop = stop or self._stop
        if self.failure is not None:  # a helper was lost before there was a loop to tell
            self._stop.set()
        try:
            server = await transport.listen(host, port, self._connected)
        except OSError as error:
            raise ConfigError(f"cannot listen on {listen}: {error.strerror or error}") from None
        bound = server.sockets[0].getsockname()
        address = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
        try:
            announcer = self._announcer(address)
        except ConfigError:
            server.close()
            raise
        self.serving()
        self._thread.start()
        timer = asyncio.create_task(self._timer())
        telling = None if announcer is None else asyncio.create_task(announcer.run())
        try:
            with self._signals():
                ready(address)
                await self._stop.wait()
            if announcer is not None and telling is not None:
                telling.cancel()
                await announcer.leave()
            await self._drain(drain_timeout_s)
        finally:
            timer.cancel()
            if telling is not None:
                telling.cancel()
            server.close()
            for peer in list(self.peers):
                peer.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(timer, *self._tasks, return_exceptions=True)
            await asyncio.to_thread(self._thread.stop)
            await self.close()
        if self.failure is not None:
            raise EngineLost(f"the {self.role} worker failed: {self.failure}")

    async def _drain(self, timeout_s: float) -> None:
        """No new requests; those here may finish; then everything published is made durable."""
        for peer in self.peers:
            self._beat(peer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.unfinished() and self.failure is None:
                    await asyncio.sleep(0.05)
        await self.flush()

    def _announcer(self, address: str) -> Announcer | None:
        if self.announcing is None:
            return None
        return Announcer(
            self.announcing.routers,
            self.cluster_key,
            role=self.role,
            address=self.announcing.address or address,
            epoch=self.epoch,
        )

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """SIGTERM and SIGINT drain; a second one has its usual effect."""
        events = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = (signal.SIGTERM, signal.SIGINT)
        for number in caught:
            events.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in caught:
                events.remove_signal_handler(number)

    def step_failed(self, error: BaseException) -> None:
        """From any thread: this worker is over."""
        self.failure = self.failure or error
        if self._events is not None:
            self._events.call_soon_threadsafe(self._stop.set)

    def _looked(self, trouble: str) -> None:
        """From the watchdog's thread."""
        self.on_look(trouble)

    async def _timer(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                self.reap(time.monotonic())
            except Exception:
                log.exception("the reaper failed; it will run again")
            for peer in self.peers:
                self._beat(peer)

    # -- peers ----------------------------------------------------------------------------------

    def _connected(self, peer: Connection) -> None:
        self._handshakes.append(peer)
        if len(self._handshakes) > MAX_HANDSHAKES:
            self._handshakes.pop(0).close()
        self.spawn(self._accept(peer))

    async def _accept(self, peer: Connection) -> None:
        try:
            await transport.accept(peer, self.hello(), self.cluster_key)
        except (TransferError, TimeoutError, OSError) as error:
            self._refusals.warn(
                "refused a connection of %s: %s",
                peer.name,
                quoted(error) or "it did not say who it is in time",
            )
            return
        finally:
            if peer in self._handshakes:
                self._handshakes.remove(peer)
        await self.serve_peer(peer)

    async def serve_peer(self, peer: Connection) -> None:
        """Handle a peer's frames until it is gone."""
        self.peers.add(peer)
        self._beat(peer)
        self.peer_joined(peer)
        try:
            while (frame := await peer.receive()) is not None:
                self._dispatch(peer, frame)
        except TransferError as error:
            log.warning("closing the connection of %s: %s", peer.name, quoted(error))
        except Exception:
            log.exception("a message of %s could not be handled; closing it", peer.name)
        finally:
            self.peers.discard(peer)
            peer.close()
            self.peer_lost(peer)

    def _dispatch(self, peer: Connection, frame: Frame) -> None:
        try:
            kind = FrameType(frame.type)
        except ValueError:
            peer.send(FrameType.UNSUPPORTED, {"type": frame.type})
            return
        try:
            if kind is FrameType.FLUSH:
                self.spawn(self._flush(peer, frame.body()))
            elif kind is FrameType.DRAIN and peer.hello.get("role") == "router":
                self.take_nothing_new(frame.body()["on"])
            elif kind not in (FrameType.HEARTBEAT, FrameType.UNSUPPORTED):
                self.handle(peer, kind, frame)
        except BadMessage as error:
            # A bad field fails the request it belongs to, and nothing else on this connection.
            if error.xid is None:
                raise
            log.warning("a message of %s is refused: %s", peer.name, quoted(error))
            self.refuse(peer, error.xid, str(error))

    def refuse(self, peer: Connection, xid: Xid, message: str) -> None:
        """End this attempt here, as its sender's fault."""
        peer.send(FrameType.ABORT, abort_body(xid, "request", message))

    def beats_to(self, peer: Connection) -> bool:
        """Whether this peer hears every second how this worker is."""
        return peer.hello.get("role") == "router"

    def _beat(self, peer: Connection) -> None:
        """A load report: counters that only grow, gauges of now."""
        if not self.beats_to(peer):
            return
        counters, gauges = self.load()
        gauges["last_step_seconds"] = self._thread.last_step_s
        gauges["step_average_seconds"] = self._thread.monitor.average_s
        peer.send(
            FrameType.HEARTBEAT,
            {
                "counters": counters,
                "gauges": gauges,
                "draining": self.draining,
                "trouble": self._thread.trouble,
            },
        )

    def take_nothing_new(self, on: bool) -> None:
        """Refuse new requests while `on`; those here may finish."""
        self._told_to_drain = on
        for peer in self.peers:
            self._beat(peer)

    async def _flush(self, peer: Connection, body: Body) -> None:
        await self.flush()
        peer.send(FrameType.FLUSHED, {"id": body.get("id")})

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the worker."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def post(self, call: Callable[..., None], *args: object) -> None:
        """Run `call(*args)` on the event loop, from any thread."""
        assert self._mailbox is not None
        self._mailbox.post(call, *args)


def abort_body(xid: Xid, reason: str, message: str = "") -> Body:
    """reason: a word the router maps to an error; message: for people."""
    return {**xid_body(xid), "reason": reason, "message": message}


def xid_of(frame: Frame) -> tuple[Xid, Body]:
    body = frame.body()
    return reading(read_xid, body), body
