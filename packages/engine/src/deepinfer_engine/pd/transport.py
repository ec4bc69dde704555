"""TCP connections that carry frames between authenticated peers.

Handshake. The accepting side speaks first: HELLO with a nonce. The connecting side answers HELLO
with its own nonce and, when there is a cluster key, a proof that it knows it; WELCOME carries the
proof of the accepting side. A proof is HMAC-SHA256 over role and both nonces: the key itself
never travels.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.wire import Body, FrameType

HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 64 << 20
MAX_UNREAD_BYTES = 16 << 20
"""Frames received but not taken yet, beyond which the peer has to wait."""


@dataclass(frozen=True, slots=True)
class Frame:
    type: int
    data: memoryview

    def body(self) -> Body:
        return wire.unpack_body(self.data)


class Connection(asyncio.BufferedProtocol):
    """One peer. `send` never blocks; `drain` waits while much is unsent.

    Bodies are received straight into a buffer of their own size: no stream buffer, no slicing.
    """

    def __init__(self, made: Callable[[Connection], None] | None = None) -> None:
        """`made` is called when the socket is connected, before anything is authenticated."""
        self._made = made
        self._sent = 0
        self._received = 0
        self._head = memoryview(bytearray(wire.FRAME.size))
        self._frame: wire.FrameHeader | None = None
        """Header of the frame whose body is being received."""
        self._target = self._head
        self._filled = 0
        self._frames: deque[Frame] = deque()
        self._unread = 0
        self._error: TransferError | None = None
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self.limit = wire.MAX_HELLO_BYTES
        """Largest body accepted now; small until the peer is known."""
        self.name = "?"
        self.hello: Body = {}

    # -- for the workers and the router ---------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, kind: FrameType, body: Body) -> None:
        """Queue a control frame. On a closed connection it is lost, as it would be on the way."""
        self._write(kind, [wire.pack_body(body)])

    def send_unit(self, header: wire.UnitHeader, views: Sequence[memoryview]) -> None:
        """Queue a data frame; the views must stay unchanged until the peer has answered."""
        self._write(FrameType.UNIT, [header.pack(), *views])

    def _write(self, kind: FrameType, parts: Sequence[bytes | memoryview]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()  # a peer that does not read is as good as gone
            return
        header = wire.pack_frame(kind, self._sent, sum(len(part) for part in parts))
        self._sent += 1
        self._transport.write(header)
        for part in parts:
            self._transport.write(part)

    async def drain(self) -> None:
        """Wait until little is unsent. Raises ConnectionError when the peer is gone."""
        await self._writable.wait()
        if self.closed:
            raise ConnectionResetError("the connection is closed")

    async def receive(self) -> Frame | None:
        """The next frame; None at the end. TransferError on a frame that breaks the protocol."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._lost.is_set():
                return None
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        self._unread -= len(frame.data)
        if self._unread <= MAX_UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        return frame

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        await self._lost.wait()

    # -- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.name = str(transport.get_extra_info("peername"))
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
            self._target, self._filled = memoryview(bytearray(self._frame.length)), 0
            if self._frame.length:
                return
        self._frames.append(Frame(self._frame.type, self._target))
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


async def connect(address: str, hello: Body, cluster_key: bytes | None) -> Connection:
    """Connect and authenticate. Raises OSError (unreachable) or TransferError (refused)."""
    host, port = parse_address(address)
    check_key(host, cluster_key)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, host, port)
        try:
            theirs = await _expect(connection, FrameType.HELLO)
            nonces = _nonce(theirs), secrets.token_bytes(32)
            mine = {**hello, "nonce": nonces[1]}
            if cluster_key is not None:
                mine["proof"] = _proof(cluster_key, b"connect", *nonces)
            connection.send(FrameType.HELLO, mine)
            welcome = await _expect(connection, FrameType.WELCOME)
            _check_proof(cluster_key, b"accept", *nonces, welcome)
        except BaseException:
            connection.close()
            raise
    connection.limit = wire.MAX_CONTROL_BYTES
    connection.hello = theirs
    return connection


async def accept(connection: Connection, hello: Body, cluster_key: bytes | None) -> None:
    """The accepting side's half. Raises TransferError for a peer that does not prove the key."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            nonce = secrets.token_bytes(32)
            connection.send(FrameType.HELLO, {**hello, "nonce": nonce})
            theirs = await _expect(connection, FrameType.HELLO)
            nonces = nonce, _nonce(theirs)
            _check_proof(cluster_key, b"connect", *nonces, theirs)
            welcome: Body = {}
            if cluster_key is not None:
                welcome["proof"] = _proof(cluster_key, b"accept", *nonces)
            connection.limit = wire.MAX_CONTROL_BYTES
            connection.send(FrameType.WELCOME, welcome)
    except BaseException:
        connection.close()
        raise
    connection.hello = theirs


async def _expect(connection: Connection, kind: FrameType) -> Body:
    frame = await connection.receive()
    if frame is None:
        raise TransferError("the peer closed the connection during the handshake")
    if frame.type == FrameType.UNSUPPORTED:
        raise TransferError(f"the peer refused: {frame.body().get('reason')}")
    if frame.type != kind:
        raise TransferError(f"expected {kind.name} of the peer, got a frame of type {frame.type}")
    return frame.body()


def _nonce(hello: Body) -> bytes:
    nonce = hello.get("nonce")
    if not isinstance(nonce, bytes) or len(nonce) != 32:
        raise TransferError("the peer's HELLO has no nonce of 32 bytes")
    return nonce


def _proof(key: bytes, side: bytes, accept_nonce: bytes, connect_nonce: bytes) -> bytes:
    return hmac.new(key, side + accept_nonce + connect_nonce, hashlib.sha256).digest()


def _check_proof(
    key: bytes | None, side: bytes, accept_nonce: bytes, connect_nonce: bytes, body: Body
) -> None:
    if key is None:
        return
    proof = body.get("proof")
    if not isinstance(proof, bytes) or not hmac.compare_digest(
        proof, _proof(key, side, accept_nonce, connect_nonce)
    ):
        raise TransferError("the peer does not know this cluster's key")
