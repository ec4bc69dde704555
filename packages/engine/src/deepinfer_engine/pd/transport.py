"""TCP connections that carry frames between authenticated peers.

Handshake. The accepting side speaks first. Both say HELLO (version, role, epoch, nonce, and with a
cluster key a public key of this connection); from then on every frame is sealed, see `sealing.py`.
The connecting side says who it is (IDENTITY), the accepting side likewise (WELCOME): a peer that
can be read by the derived key knows the cluster key, which itself never travels. Without a cluster
key nothing is sealed, and only peers of this machine are taken.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd import schema, wire
from deepinfer_engine.pd.buffers import Buffers
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.sealing import PUBLIC_BYTES, Cipher, KeyAgreement
from deepinfer_engine.pd.wire import Body, FrameType

HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 64 << 20
MAX_UNREAD_BYTES = 6 << 20
"""Frames received but not taken yet, beyond which the peer has to wait: some units, which still lie
in a cache when their turn comes."""

Place = Callable[[wire.UnitHeader], Sequence[memoryview] | None]


@dataclass(frozen=True, slots=True)
class Frame:
    """`data` of a UNIT is valid until the next frame is asked for: its memory is used again."""

    type: int
    data: memoryview
    placed: bool = False
    """A UNIT whose bytes lie where `Connection.place` said; `data` is its header alone."""

    def body(self) -> Body:
        """The message, as its schema has it. Raises TransferError."""
        body = wire.unpack_body(self.data)
        schema.check(self.type, body)
        return body


class Connection(asyncio.BufferedProtocol):
    """One peer. `send` never blocks; `drain` waits while much is unsent.

    Bodies are received straight into a buffer of their own: no stream buffer, no slicing. Those of
    units are used again and again, so that their pages are there and lie in a cache.
    """

    def __init__(self, made: Callable[[Connection], None] | None = None) -> None:
        """`made` is called when the socket is connected, before anything is authenticated."""
        self._made = made
        self._sent = 0
        self._received = 0
        self._head = memoryview(bytearray(wire.FRAME.size))
        self._frame: wire.FrameHeader | None = None
        """Header of the frame whose body is being received."""
        self._seals: Cipher | None = None
        self._opens: Cipher | None = None
        """Set when both HELLOs are there; from then on nothing goes or comes in clear."""
        self._target = self._head
        self._filled = 0
        self._frames: deque[tuple[wire.FrameHeader, bytes, memoryview]] = deque()
        self._unread = 0
        self._buffers = Buffers()
        self.place: Place = lambda header: None
        """Where the bytes of a unit go when it is received; None: into memory of the connection.
        The header may be a stranger's: it is known to be the peer's when the frame is there."""
        self._lent: memoryview | None = None
        """That of the unit that `receive` gave last."""
        self._error: TransferError | None = None
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self.limit = wire.MAX_HELLO_BYTES
        """Largest body accepted now; small until the peer is known."""
        self.name = "?"
        self.peer_host = ""
        self.hello: Body = {}

    # -- for the workers and the router ---------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, kind: FrameType, body: Body) -> None:
        """Queue a control frame. On a closed connection it is lost, as it would be on the way."""
        self._write(kind, [wire.pack_body(body)])

    def send_raw(self, kind: FrameType, body: bytes) -> None:
        """Queue a control frame whose body is packed already."""
        self._write(kind, [body])

    def send_unit(self, header: wire.UnitHeader, views: Sequence[memoryview]) -> None:
        """Queue a data frame; the views must stay unchanged until the peer has answered."""
        self._write(FrameType.UNIT, [header.pack(), *views])

    def _write(self, kind: FrameType, parts: Sequence[bytes | memoryview]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()  # a peer that does not read is as good as gone
            return
        size = sum(len(part) for part in parts)
        if self._seals is None:
            header = wire.pack_frame(kind, self._sent, size)
            self._transport.writelines([header, *parts])
            self._buffers.queued(len(header) + size)
        else:
            self._write_sealed(kind, parts, size + wire.TAG_BYTES)
        self._sent += 1

    def _write_sealed(
        self, kind: FrameType, parts: Sequence[bytes | memoryview], size: int
    ) -> None:
        assert self._transport is not None
        assert self._seals is not None
        header = wire.pack_frame(kind, self._sent, size, sealed=True)
        self._buffers.sent(self._transport.get_write_buffer_size())
        if kind is FrameType.UNIT:
            buffer = self._buffers.take(size)
            self._seals.seal_into(self._sent, header, parts, buffer)
            self._transport.writelines([header, buffer])
            self._buffers.queued(len(header) + size, buffer)
        else:
            body = self._seals.seal(self._sent, header, parts)
            self._transport.writelines([header, body])
            self._buffers.queued(len(header) + size)

    def seal(self, outgoing: Cipher, incoming: Cipher) -> None:
        """From here on frames are sealed, both ways."""
        self._seals, self._opens = outgoing, incoming

    async def drain(self) -> None:
        """Wait until little is unsent. Raises ConnectionError when the peer is gone."""
        await self._writable.wait()
        if self.closed:
            raise ConnectionResetError("the connection is closed")

    async def receive(self) -> Frame | None:
        """The next frame; None at the end. TransferError on a frame that breaks the protocol."""
        if self._lent is not None:
            self._buffers.back(self._lent)
            self._lent = None
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._lost.is_set():
                return None
            self._arrived.clear()
            await self._arrived.wait()
        header, raw, data = self._frames.popleft()
        self._unread -= len(data)
        if self._unread <= MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        if header.sealed != (self._opens is not None):
            state = "in clear" if self._opens is not None else "sealed"
            raise TransferError(
                f"a frame came {state}: give all workers and the router the same cluster key"
            )
        if header.type == FrameType.UNIT:
            return self._unit(header, raw, data)
        if self._opens is not None:
            data = self._opens.open(header.seq, raw, data)
        return Frame(header.type, data)

    def _unit(self, header: wire.FrameHeader, raw: bytes, body: memoryview) -> Frame:
        """A unit, opened or copied to its place; its memory is used again after the next."""
        self._lent = body
        size = len(body) - (wire.TAG_BYTES if self._opens is not None else 0)
        if size < wire.UNIT_HEADER_BYTES:
            raise TransferError(f"a unit of {size} bytes has no header")
        if self._opens is None:
            views = self._placed(body, len(body))
            if views is None:
                return Frame(header.type, body)
            at = wire.UNIT_HEADER_BYTES
            for view in views:
                view[:] = body[at : at + len(view)]
                at += len(view)
            return Frame(header.type, body[: wire.UNIT_HEADER_BYTES], placed=True)
        opening = self._opens.opening(header.seq, raw, body)
        head = memoryview(bytearray(wire.UNIT_HEADER_BYTES))
        opening.read(head)
        views = self._placed(head, size)
        if views is not None:
            for view in views:
                opening.read(view)
            opening.end()
            return Frame(header.type, head, placed=True)
        plain = self._buffers.take(size)
        plain[: len(head)] = head
        opening.read(plain[len(head) :])
        self._buffers.back(body)
        self._lent = plain
        opening.end()
        return Frame(header.type, plain)

    def _placed(self, data: memoryview, size: int) -> Sequence[memoryview] | None:
        """Where a unit's bytes go, by its header; nowhere by one that is not right."""
        try:
            unit = wire.UnitHeader.unpack(data[: wire.UNIT_HEADER_BYTES], elsewhere=True)
        except TransferError:
            return None
        return self.place(unit) if unit.nbytes == size - wire.UNIT_HEADER_BYTES else None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        await self._lost.wait()

    # -- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: other event loops have transports of their own.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.name = quoted(peer)
        self.peer_host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._made is not None:
            self._made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        if self._frame is None:
            try:
                self._frame = wire.unpack_frame(self._head, self._received, self.limit)
            except TransferError as error:
                self._error = error
                self.close()
                self._arrived.set()
                return
            length = self._frame.length
            unit = self._frame.type == FrameType.UNIT
            self._target = self._buffers.take(length) if unit else memoryview(bytearray(length))
            self._filled = 0
            if self._frame.length:
                return
        self._frames.append((self._frame, bytes(self._head), self._target))
        self._received += 1
        self._unread += len(self._target)
        self._frame, self._target, self._filled = None, self._head, 0
        if self._unread > MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self._arrived.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()


def parse_address(address: str) -> tuple[str, int]:
    """ "host:port" or "[v6]:port". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f'an address is "host:port", got {address!r}')
    return host, int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_key(host: str, cluster_key: bytes | None) -> None:
    """ConfigError when peers beyond this machine could connect without a key."""
    if cluster_key is None and not is_loopback(host):
        raise ConfigError(
            f"{host} is not a loopback address: give all workers and the router the same cluster "
            "key, or bind to 127.0.0.1"
        )


async def listen(host: str, port: int, made: Callable[[Connection], None]) -> asyncio.Server:
    """Accept connections; each has yet to pass `accept`. Raises OSError."""
    return await asyncio.get_running_loop().create_server(lambda: Connection(made), host, port)


async def connect(address: str, identity: Body, cluster_key: bytes | None) -> Connection:
    """Connect and authenticate. Raises OSError (unreachable) or TransferError (refused)."""
    host, port = parse_address(address)
    check_key(host, cluster_key)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, host, port)
        try:
            theirs, raw = await _expect(connection, FrameType.HELLO)
            agreement = None if cluster_key is None else KeyAgreement(cluster_key)
            mine = _hello(identity, agreement)
            connection.send_raw(FrameType.HELLO, mine)
            if agreement is None:
                _check_keyless(theirs)
            else:
                to_them, from_them = agreement.ciphers(_public(theirs), raw, mine)
                connection.seal(to_them, from_them)
            connection.send(FrameType.IDENTITY, identity)
            welcome, _ = await _expect(connection, FrameType.WELCOME)
            _check_identity(theirs, welcome)
        except BaseException:
            connection.close()
            raise
    connection.limit = wire.MAX_CONTROL_BYTES
    connection.hello = welcome
    return connection


async def accept(connection: Connection, identity: Body, cluster_key: bytes | None) -> None:
    """The accepting side's half. Raises TransferError for a peer that does not know the key."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            _check_place(connection, cluster_key)
            agreement = None if cluster_key is None else KeyAgreement(cluster_key)
            mine = _hello(identity, agreement)
            connection.send_raw(FrameType.HELLO, mine)
            theirs, raw = await _expect(connection, FrameType.HELLO)
            if agreement is not None:
                from_them, to_them = agreement.ciphers(_public(theirs), mine, raw)
                connection.seal(to_them, from_them)
            else:
                _check_keyless(theirs)
            said, _ = await _expect(connection, FrameType.IDENTITY)
            _check_identity(theirs, said)
            connection.limit = wire.MAX_CONTROL_BYTES
            connection.send(FrameType.WELCOME, identity)
    except BaseException:
        connection.close()
        raise
    connection.hello = said


def _hello(identity: Body, agreement: KeyAgreement | None) -> bytes:
    hello: Body = {
        "role": identity["role"],
        "epoch": identity["epoch"],
        "nonce": secrets.token_bytes(32),
    }
    if agreement is not None:
        hello["public_key"] = agreement.public
    return wire.pack_body(hello)


async def _expect(connection: Connection, kind: FrameType) -> tuple[Body, bytes]:
    frame = await connection.receive()
    if frame is None:
        raise TransferError(
            "the peer closed the connection during the handshake: it has another cluster key, or "
            "refuses this worker"
        )
    if frame.type != kind:
        raise TransferError(f"expected {kind.name} of the peer, got a frame of type {frame.type}")
    return frame.body(), bytes(frame.data)


def _public(hello: Body) -> bytes:
    public = hello.get("public_key")
    if not isinstance(public, bytes) or len(public) != PUBLIC_BYTES:
        raise TransferError("the peer has no cluster key, and this worker has one")
    return public


def _check_place(connection: Connection, cluster_key: bytes | None) -> None:
    if cluster_key is None and not is_loopback(connection.peer_host):
        raise TransferError("without a cluster key only peers of this machine are taken")


def _check_keyless(hello: Body) -> None:
    if "public_key" in hello:
        raise TransferError("the peer has a cluster key, and this worker has none")


def _check_identity(hello: Body, identity: Body) -> None:
    """What was said in clear is what is said under seal."""
    if (hello["role"], hello["epoch"]) != (identity["role"], identity["epoch"]):
        raise TransferError("the peer is another one than its HELLO said")
