"""The TCP service of one machine: answers pulls, and keeps its share of the location service.

One event loop in one thread. Window bytes are sent from the slot itself, which stays pinned for as
long as that takes; a puller that stops reading loses its connection when its own deadline is over.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from deepinfer_kvtier.base.config import split_address
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.remote.state_exchange import wire
from deepinfer_kvtier.remote.state_exchange.locations import LocalLocations
from deepinfer_kvtier.remote.state_exchange.wire import (
    PullAnswer,
    PullRequest,
    StagedAnswer,
    WindowRecord,
)

HANDSHAKE_TIMEOUT_S = 2.0
IDLE_TIMEOUT_S = 300.0
MAX_SEND_S = 10.0


class Held(Protocol):
    """A pinned window, ready to be sent."""

    answer: PullAnswer
    view: memoryview

    def release(self) -> None: ...


class WindowService:
    """Serves until `stop`. hold(request): pins what a puller asks for, or says why not.

    stage(window, seconds): where another transport may read it for so long, or None.

    raises: ConfigError when the address cannot be used.
    """

    def __init__(
        self,
        listen: str,
        key: bytes,
        locations: LocalLocations,
        hold: Callable[[PullRequest], Held | int],
        *,
        max_connections: int,
        stage: Callable[[memoryview, float], tuple[int, str] | None] | None = None,
    ) -> None:
        self._key = key
        self._locations = locations
        self._hold = hold
        self._stage = stage
        self._max_connections = max_connections
        self._tasks: set[asyncio.Task[None]] = set()
        # Connections that say nothing now, longest first: without the key yet, and the others.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._members: dict[asyncio.Task[None], None] = {}
        self.counts: Counter[str] = Counter()
        host, port = split_address(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(64)
        except OSError as cause:
            self._socket.close()
            raise ConfigError(f"windows: cannot listen on {listen}: {cause}") from cause
        self._socket.setblocking(False)
        bound_host, bound_port = self._socket.getsockname()[:2]
        self.address = wire.join_address(ipaddress.ip_address(bound_host), bound_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvtier-windows", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        for task in (accepting, *self._tasks):
            task.cancel()
        ended = asyncio.gather(accepting, *self._tasks, return_exceptions=True)
        self._loop.run_until_complete(ended)
        self._socket.close()
        self._loop.close()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._socket)
            except OSError:  # out of descriptors, or reset before it was accepted
                self.counts["accept_errors"] += 1
                await asyncio.sleep(0.05)
                continue
            if len(self._tasks) >= self._max_connections and not self._make_room():
                self.counts["refused_connections"] += 1
                connection.close()
                continue
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            self._strangers[task] = None
            task.add_done_callback(self._forget)

    def _make_room(self) -> bool:
        """End the connection that has been silent longest, strangers first: nobody locks others
        out by saying nothing. False when all are being answered."""
        for waiting in (self._strangers, self._members):
            for task in waiting:
                self._forget(task)
                task.cancel()
                self.counts["ousted_connections"] += 1
                return True
        return False

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        self._members.pop(task, None)

    async def _serve(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        with connection, suppress(asyncio.CancelledError):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    session = await self._greet(connection)
                self._strangers.pop(task, None)
                while True:
                    self._members[task] = None
                    async with asyncio.timeout(IDLE_TIMEOUT_S):
                        head = await self._read(connection, wire.HEAD_BYTES)
                    self._members.pop(task, None)
                    async with asyncio.timeout(MAX_SEND_S):
                        body = await self._read(connection, wire.body_length(head))
                        await self._answer(connection, session, session.open(head, body), body)
            except wire.WireError:
                self.counts["protocol_errors"] += 1
            except (OSError, EOFError):  # TimeoutError is an OSError
                self.counts["ended_connections"] += 1

    async def _greet(self, connection: socket.socket) -> wire.Session:
        mine = wire.new_nonce()
        await self._loop.sock_sendall(connection, mine)
        size = len(wire.MAGIC) + wire.NONCE_BYTES + wire.PROOF_BYTES
        hello = await self._read(connection, size)
        magic, rest = hello[: len(wire.MAGIC)], hello[len(wire.MAGIC) :]
        theirs, proof = rest[: wire.NONCE_BYTES], rest[wire.NONCE_BYTES :]
        if magic != wire.MAGIC:
            raise wire.WireError("not a peer of this protocol")
        wire.check_proof(self._key, wire.CLIENT, mine, theirs, proof)
        await self._loop.sock_sendall(connection, wire.proof(self._key, wire.SERVER, mine, theirs))
        return wire.Session(self._key, mine, theirs, wire.SERVER)

    async def _answer(
        self, connection: socket.socket, session: wire.Session, kind: int, body: bytes
    ) -> None:
        if kind == wire.PULL:
            await self._send_window(connection, session, PullRequest.unpack(body))
            return
        if kind == wire.STAGE:
            answer = self._staged(PullRequest.unpack(body)).pack()
            await self._loop.sock_sendall(connection, session.seal(kind, answer))
            return
        answer = b""
        if kind == wire.LOOKUP:
            keys = wire.split_records(body, wire.KEY_BYTES)
            if len(keys) * wire.RECORD_BYTES > wire.MAX_BODY_BYTES:
                raise wire.WireError(f"{len(keys)} keys in one lookup")
            found = self._locations.lookup(keys)
            nothing = bytes(wire.RECORD_BYTES)
            answer = b"".join(nothing if r is None else r.pack() for r in found)
        elif kind == wire.PUBLISH:
            records = wire.split_records(body, wire.RECORD_BYTES)
            self._locations.publish([WindowRecord.unpack(data) for data in records])
        elif kind == wire.WITHDRAW:
            for item in wire.split_records(body, wire.KEY_BYTES + wire.MACHINE_BYTES):
                self._locations.withdraw([item[: wire.KEY_BYTES]], item[wire.KEY_BYTES :])
        else:
            raise wire.WireError(f"unknown request {kind}")
        await self._loop.sock_sendall(connection, session.seal(kind, answer))

    async def _send_window(
        self, connection: socket.socket, session: wire.Session, request: PullRequest
    ) -> None:
        held = self._hold(request)
        if isinstance(held, int):
            self.counts["pulls_refused"] += 1
            refusal = session.seal(wire.PULL, PullAnswer.refusal(held).pack())
            await self._loop.sock_sendall(connection, refusal)
            return
        try:
            async with asyncio.timeout(request.budget_ms / 1000):
                head = session.seal(wire.PULL, held.answer.pack())
                hasher = session.bulk_hasher(sending=True)
                hasher.update(held.view)
                await self._send_both(connection, memoryview(head), held.view)
                await self._loop.sock_sendall(connection, hasher.digest()[: wire.TAG_BYTES])
            self.counts["pulls_served"] += 1
            self.counts["bytes_served"] += held.view.nbytes
        finally:
            held.release()

    async def _send_both(
        self, connection: socket.socket, head: memoryview, window: memoryview
    ) -> None:
        """In one call as far as the socket takes it: the peer wakes up once, not twice."""
        try:
            sent = connection.sendmsg([head, window])
        except BlockingIOError:
            sent = 0
        if sent < head.nbytes:
            await self._loop.sock_sendall(connection, head[sent:])
        await self._loop.sock_sendall(connection, window[max(0, sent - head.nbytes) :])

    def _staged(self, request: PullRequest) -> StagedAnswer:
        if self._stage is None:
            return StagedAnswer(PullAnswer.refusal(wire.NOT_STAGED))
        held = self._hold(request)
        if isinstance(held, int):
            self.counts["pulls_refused"] += 1
            return StagedAnswer(PullAnswer.refusal(held))
        try:
            place = self._stage(held.view, min(MAX_SEND_S, request.budget_ms / 1000))
        finally:
            held.release()
        if place is None:
            return StagedAnswer(PullAnswer.refusal(wire.NOT_STAGED))
        self.counts["pulls_staged"] += 1
        return StagedAnswer(held.answer, *place)

    async def _read(self, connection: socket.socket, size: int) -> bytes:
        data = bytearray(size)
        at = 0
        while at < size:
            got = await self._loop.sock_recv_into(connection, memoryview(data)[at:])
            if got == 0:
                raise EOFError
            at += got
        return bytes(data)
