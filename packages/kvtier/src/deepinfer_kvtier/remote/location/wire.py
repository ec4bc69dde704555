"""Frames between a location client and a shard: bounded, numbered, and keyed.

Handshake: the server sends magic and 16 random bytes, the client 16 random bytes and an
HMAC-SHA256 over both, the server an HMAC of its own. Both then know that the other holds the shared
key, and every later frame carries a 16-byte keyed BLAKE3 tag over direction, running number and
content. Frames are authentic and cannot be replayed or reordered; they are not secret.

Frame, little endian: u32 bytes that follow | u8 operation | u32 request number | body | 16-byte
tag.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from typing import Final

from blake3 import blake3

MAGIC: Final = b"KVTDIR1\0"
NONCE_BYTES: Final = 16
TAG_BYTES: Final = 16
MAX_FRAME_BYTES: Final = 1 << 20
HANDSHAKE_S: Final = 5.0

LOOKUP: Final = 1
PUBLISH: Final = 2
RETRACT: Final = 3
STATS: Final = 4
REFUSED: Final = 255

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BI")


class WireError(Exception):
    """The other side breaks the protocol, or does not hold the key; the connection is over."""


class Channel:
    """One connection after its handshake."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: bytes,
        *,
        server: bool,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._session = session
        self._outgoing = b"s" if server else b"c"
        self._incoming = b"c" if server else b"s"
        self._sent = 0
        self._received = 0

    async def send(self, operation: int, number: int, body: bytes) -> None:
        """One frame. raises: WireError for a body that is too long, OSError."""
        content = _HEAD.pack(operation, number) + body
        if len(content) + TAG_BYTES > MAX_FRAME_BYTES:
            raise WireError(f"a frame has at most {MAX_FRAME_BYTES} bytes, got {len(content)}")
        tag = self._tag(self._outgoing, self._sent, content)
        self._sent += 1
        self._writer.write(_LENGTH.pack(len(content) + TAG_BYTES) + content + tag)
        await self._writer.drain()

    async def receive(self) -> tuple[int, int, memoryview]:
        """(operation, request number, body). raises: WireError, EOFError, OSError."""
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if not _HEAD.size + TAG_BYTES <= size <= MAX_FRAME_BYTES:
            raise WireError(f"a frame has at most {MAX_FRAME_BYTES} bytes, announced are {size}")
        raw = await self._reader.readexactly(size)
        content, tag = raw[:-TAG_BYTES], raw[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(self._incoming, self._received, content)):
            raise WireError("a frame has a wrong tag")
        self._received += 1
        operation, number = _HEAD.unpack_from(content)
        return operation, number, memoryview(content)[_HEAD.size :]

    def close(self) -> None:
        """Close without waiting."""
        self._writer.close()

    def _tag(self, direction: bytes, number: int, content: bytes) -> bytes:
        data = direction + number.to_bytes(8, "little") + content
        return blake3(data, key=self._session).digest(length=TAG_BYTES)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Channel:
    """Server side of the handshake. raises: WireError, EOFError, OSError, TimeoutError."""
    async with asyncio.timeout(HANDSHAKE_S):
        ours = secrets.token_bytes(NONCE_BYTES)
        writer.write(MAGIC + ours)
        await writer.drain()
        answer = await reader.readexactly(NONCE_BYTES + 32)
        nonces = ours + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], _mac(key, b"client", nonces)):
            raise WireError("the client does not hold the shared key")
        writer.write(_mac(key, b"server", nonces))
        await writer.drain()
    return Channel(reader, writer, _mac(key, b"session", nonces), server=True)


async def connect(host: str, port: int, key: bytes) -> Channel:
    """Client side. raises: WireError, EOFError, OSError."""
    reader, writer = await asyncio.open_connection(host, port, limit=MAX_FRAME_BYTES)
    try:
        nonces = await _prove(reader, writer, key)
    except BaseException:
        writer.close()
        raise
    return Channel(reader, writer, _mac(key, b"session", nonces), server=False)


async def _prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> bytes:
    """Both proofs; returns the nonces of both sides."""
    hello = await reader.readexactly(len(MAGIC) + NONCE_BYTES)
    if not hello.startswith(MAGIC):
        raise WireError("this is no location service, or another version of it")
    mine = secrets.token_bytes(NONCE_BYTES)
    nonces = hello[len(MAGIC) :] + mine
    writer.write(mine + _mac(key, b"client", nonces))
    await writer.drain()
    try:
        proof = await reader.readexactly(32)
    except asyncio.IncompleteReadError as cause:
        raise WireError("the service refused the shared key") from cause
    if not hmac.compare_digest(proof, _mac(key, b"server", nonces)):
        raise WireError("the service does not hold the shared key")
    return nonces


def _mac(key: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, b"kvtier directory " + purpose + nonces, hashlib.sha256).digest()
