"""Asking other machines, within a deadline: pooled connections and a memory of who is dead."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from deepinfer_kvtier.base.config import split_address
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.remote.state_exchange import wire

T = TypeVar("T")
_IDLE_PER_PEER = 4


@dataclass(slots=True)
class _Health:
    missed: int = 0
    dead_until: float = 0.0


class PeerHealth:
    """A peer that misses `dead_after` deadlines in a row is left alone for `retry_s` seconds."""

    def __init__(self, *, dead_after: int, retry_s: float, clock: Clock) -> None:
        self._dead_after = dead_after
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[str, _Health] = {}

    def alive(self, address: str) -> bool:
        """Whether asking is worth its deadline."""
        with self._lock:
            health = self._peers.get(address)
            return health is None or health.dead_until <= self._clock.monotonic()

    def succeeded(self, address: str) -> None:
        """It answered, whatever it said."""
        with self._lock:
            self._peers.pop(address, None)

    def failed(self, address: str) -> None:
        """It did not answer in time. After a retry fails, it is dead again at once."""
        with self._lock:
            health = self._peers.setdefault(address, _Health())
            health.missed += 1
            if health.missed >= self._dead_after:
                health.dead_until = self._clock.monotonic() + self._retry_s

    def dead(self) -> int:
        """Peers left alone now."""
        now = self._clock.monotonic()
        with self._lock:
            return sum(health.dead_until > now for health in self._peers.values())


class Deadline:
    """Wall time left, for blocking sockets: they wait for real, whatever a test's clock says."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; raises TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return left


class _Connection:
    def __init__(self, address: str, key: bytes, deadline: Deadline) -> None:
        host, port = split_address(address)
        self._socket = socket.create_connection((host, port), timeout=deadline.left())
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs = self._take(wire.NONCE_BYTES, deadline)
            mine = wire.new_nonce()
            proof = wire.proof(key, wire.CLIENT, theirs, mine)
            self.write(wire.MAGIC + mine + proof, deadline)
            answer = self._take(wire.PROOF_BYTES, deadline)
            wire.check_proof(key, wire.SERVER, theirs, mine, answer)
            self._session = wire.Session(key, theirs, mine, wire.CLIENT)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, kind: int, body: bytes, deadline: Deadline) -> bytes:
        """One frame out, the body of one frame back."""
        self.write(self._session.seal(kind, body), deadline)
        head = self._take(wire.HEAD_BYTES, deadline)
        answer = self._take(wire.body_length(head), deadline)
        if self._session.open(head, answer) != kind:
            raise wire.WireError("the peer answered another question")
        return answer

    def read(
        self, views: Sequence[memoryview], deadline: Deadline, hashers: Sequence[Any] = ()
    ) -> None:
        """Fill the views, straight from the socket; what has arrived is hashed while more comes."""
        for view in views:
            at = 0
            while at < view.nbytes:
                self._socket.settimeout(deadline.left())
                got = self._socket.recv_into(view[at:])
                if got == 0:
                    raise ConnectionResetError("the peer closed the connection")
                for hasher in hashers:
                    hasher.update(view[at : at + got])
                at += got

    def read_bulk(
        self, views: Sequence[memoryview], deadline: Deadline, checksum: xxhash.xxh3_128
    ) -> None:
        """A bulk frame. raises: WireError when the bytes are not those that the peer sent."""
        hasher = self._session.bulk_hasher(sending=False)
        self.read(views, deadline, (checksum, hasher))
        tag = self._take(wire.TAG_BYTES, deadline)
        if not hmac.compare_digest(tag, hasher.digest()[: wire.TAG_BYTES]):
            raise wire.WireError("the bytes of a window are not those that the peer sent")

    def _take(self, size: int, deadline: Deadline) -> bytes:
        data = bytearray(size)
        self.read([memoryview(data)], deadline)
        return bytes(data)

    def write(self, data: bytes, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.left())
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()


class PeerClient:
    """Calls to peers. Thread-safe; a connection that failed in any way is never used again."""

    def __init__(self, key: bytes, health: PeerHealth) -> None:
        self._key = key
        self.health = health
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Connection]] = {}
        self._closed = False
        self.counts: Counter[str] = Counter()

    def call(self, address: str, kind: int, body: bytes, timeout_s: float) -> bytes:
        """Ask a peer one thing. raises: OSError (TimeoutError when it took too long or is dead)."""
        return self._with_connection(
            address, timeout_s, lambda connection, deadline: connection.ask(kind, body, deadline)
        )

    def pull(
        self, address: str, request: wire.PullRequest, views: Sequence[memoryview], timeout_s: float
    ) -> tuple[Status, wire.PullAnswer | None]:
        """One try at a window, straight into `views`; after a failure they hold anything.

        returns: OK only when all bytes are there and their checksum is right; MISS when the holder
                 has it no longer, TIMEOUT when it is late or dead, CORRUPT, ERROR.
        """
        if not self.health.alive(address):
            self.counts["skipped_dead"] += 1
            return Status.TIMEOUT, None

        hasher = xxhash.xxh3_128()

        def ask(connection: _Connection, deadline: Deadline) -> wire.PullAnswer:
            answer = wire.PullAnswer.unpack(connection.ask(wire.PULL, request.pack(), deadline))
            if answer.status == wire.HELD:
                if answer.nbytes != sum(view.nbytes for view in views):
                    raise wire.WireError("the window offered has another size")
                # After a connection that turned out to be closed, this is asked again.
                hasher.reset()
                connection.read_bulk(views, deadline, hasher)
            return answer

        try:
            answer = self._with_connection(address, timeout_s, ask)
        except TimeoutError:
            self.counts["timeouts"] += 1
            return Status.TIMEOUT, None
        except OSError:
            self.counts["errors"] += 1
            return Status.ERROR, None
        if answer.status != wire.HELD:
            self.counts["gone"] += 1
            return Status.MISS, answer
        if hasher.digest() != answer.checksum:
            self.counts["corrupt"] += 1
            return Status.CORRUPT, answer
        return Status.OK, answer

    def forget(self, addresses: set[str]) -> None:
        """Close idle connections to peers that are none any more."""
        with self._lock:
            gone = [self._idle.pop(a) for a in addresses if a in self._idle]
        for connections in gone:
            for connection in connections:
                connection.close()

    def close(self) -> None:
        """Close what is idle; calls still running close theirs."""
        with self._lock:
            self._closed = True
        self.forget(set(self._idle))

    def _with_connection(
        self, address: str, timeout_s: float, use: Callable[[_Connection, Deadline], T]
    ) -> T:
        if not self.health.alive(address):
            raise TimeoutError(f"{address} has missed too many deadlines")
        try:
            connection, result = self._attempt(address, Deadline(timeout_s), use)
        except OSError as error:
            self.health.failed(address)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{address} did not answer in time") from error
            raise
        self.health.succeeded(address)
        self._put_back(address, connection)
        return result

    def _attempt(
        self, address: str, deadline: Deadline, use: Callable[[_Connection, Deadline], T]
    ) -> tuple[_Connection, T]:
        idle = self._take(address)
        if idle is not None:
            try:
                return idle, use(idle, deadline)
            except ConnectionError:
                # The peer closed an idle connection: that says nothing about the peer.
                idle.close()
            except BaseException:
                idle.close()
                raise
        fresh = _Connection(address, self._key, deadline)
        try:
            return fresh, use(fresh, deadline)
        except BaseException:
            fresh.close()
            raise

    def _take(self, address: str) -> _Connection | None:
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def _put_back(self, address: str, connection: _Connection) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if not self._closed and len(idle) < _IDLE_PER_PEER:
                idle.append(connection)
                return
        connection.close()
