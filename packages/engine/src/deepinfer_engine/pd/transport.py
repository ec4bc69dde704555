"""TCP connections that carry frames between authenticated peers.

Handshake. The accepting side speaks first: HELLO with a nonce. The connecting side answers HELLO
with its own nonce and, when there is a cluster key, a proof that it knows it; WELCOME carries the
proof of the accepting side. A proof is HMAC-SHA256 over role and both nonces: the key itself
never travels.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.wire import Body, FrameType

HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 64 << 20
READ_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    type: int
    data: memoryview

    def body(self) -> Body:
        return wire.unpack_body(self.data)


class Connection:
    """One authenticated peer. `send` never blocks; `drain` waits while much is unsent."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sent = 0
        self._received = 0
        self.name = name
        self.hello: Body = {}

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    def send(self, kind: FrameType, body: Body) -> None:
        """Queue a control frame. On a closed connection it is lost, as it would be on the way."""
        self._write(kind, [wire.pack_body(body)])

    def send_unit(self, header: wire.UnitHeader, views: Sequence[memoryview]) -> None:
        """Queue a data frame; the views must stay unchanged until `drain` returned."""
        self._write(FrameType.UNIT, [header.pack(), *views])

    def _write(self, kind: FrameType, parts: Sequence[bytes | memoryview]) -> None:
        if self.closed:
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close()  # a peer that does not read is as good as gone
            return
        header = wire.pack_frame(kind, self._sent, sum(len(part) for part in parts))
        self._sent += 1
        self._writer.writelines([header, *parts])

    async def drain(self) -> None:
        """Raises ConnectionError when the peer is gone."""
        await self._writer.drain()

    async def receive(self, *, limit: int = wire.MAX_CONTROL_BYTES) -> Frame | None:
        """The next frame; None at the end. TransferError on a frame that breaks the protocol."""
        try:
            header = wire.unpack_frame(
                await self._reader.readexactly(wire.FRAME.size), self._received
            )
            if header.length > limit:
                raise TransferError(f"a frame here has at most {limit} bytes, got {header.length}")
            data = await self._reader.readexactly(header.length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self._received += 1
        return Frame(header.type, memoryview(data))

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


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


async def connect(address: str, hello: Body, cluster_key: bytes | None) -> Connection:
    """Connect and authenticate. Raises OSError (unreachable) or TransferError (refused)."""
    host, port = parse_address(address)
    check_key(host, cluster_key)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port, limit=READ_BUFFER_BYTES)
        connection = _connection(reader, writer)
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
    connection.hello = theirs
    return connection


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    hello: Body,
    cluster_key: bytes | None,
) -> Connection:
    """The accepting side's half. Raises TransferError for a peer that does not prove the key."""
    connection = _connection(reader, writer)
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
            connection.send(FrameType.WELCOME, welcome)
    except BaseException:
        connection.close()
        raise
    connection.hello = theirs
    return connection


def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(reader, writer, str(writer.get_extra_info("peername")))


async def _expect(connection: Connection, kind: FrameType) -> Body:
    frame = await connection.receive(limit=wire.MAX_HELLO_BYTES)
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
