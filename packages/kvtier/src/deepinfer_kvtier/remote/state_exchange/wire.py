"""What travels between machines: 64-byte location records and authenticated frames.

Connection: the accepting side sends a nonce (32 bytes). The connecting side answers magic, its own
nonce and HMAC-SHA256(key, "client" || both nonces); the accepting side proves itself likewise. Each
frame after that is

    u32 length of the body | u8 kind | 16-byte tag | body            (little endian)

and the tag is HMAC-SHA256(session key, direction || u64 frame number || kind || body)[:16]. Window
bytes follow a PULL answer as a frame of their own: the bytes, then the 16-byte keyed BLAKE3 of
direction, frame number and bytes. Peers are authenticated, nothing is encrypted.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import struct
from dataclasses import dataclass

from blake3 import blake3

from deepinfer_kvtier.base.config import split_address

KEY_BYTES = 16
MACHINE_BYTES = 8
RECORD_BYTES = 64
MAX_BODY_BYTES = 256 << 10
"""Of one frame: 4,096 location records, or 16,384 keys."""

MAGIC = b"KVTWIN2\0"
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
_HEAD = struct.Struct("<IB16s")
HEAD_BYTES = _HEAD.size

PUBLISH, LOOKUP, WITHDRAW, PULL, STAGE = 1, 2, 3, 4, 5
CLIENT, SERVER = b"c", b"s"

_RECORD = struct.Struct("<16s8sQQIHBB16s")
_PULL = struct.Struct("<16s32sQIQ")
_ANSWER = struct.Struct("<BBHIIQ16s")
ANSWER_BYTES = _ANSWER.size

# What the holder says to a pull.
HELD, UNKNOWN, STALE, NOT_STAGED = 0, 1, 2, 3


class WireError(OSError):
    """The other side broke the protocol, or is not who it should be."""


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """A hint: the window with this key can be had there.

    key:        first 16 bytes of the digest.
    machine:    random id of the holding cache, 8 bytes.
    generation: changes when the holder restarts; a pull with another one is answered STALE.
    ttl_ms:     how long the holder will still keep it, in milliseconds from now. Relative, since
                clocks of machines differ.
    nbytes:     size of the window.
    marks:      0x80 when it is approximate, plus its replay generation.
    address:    "host:port" of the holder.
    """

    key: bytes
    machine: bytes
    generation: int
    ttl_ms: int
    nbytes: int
    marks: int
    address: str

    def pack(self) -> bytes:
        """The record as 64 bytes."""
        host, port = split_address(self.address)
        ip = ipaddress.ip_address(host)
        packed = ip.packed.ljust(16, b"\0")
        return _RECORD.pack(
            self.key,
            self.machine,
            self.generation,
            self.ttl_ms,
            self.nbytes,
            port,
            ip.version,
            self.marks,
            packed,
        )

    @staticmethod
    def unpack(data: bytes) -> WindowRecord:
        """raises: WireError where the bytes are no record."""
        try:
            key, machine, generation, ttl_ms, nbytes, port, version, marks, ip = _RECORD.unpack(
                data
            )
            host = ipaddress.ip_address(ip[:4] if version == 4 else ip)
        except (struct.error, ValueError) as cause:
            raise WireError(f"not a location record: {cause}") from cause
        address = join_address(host, port)
        return WindowRecord(key, machine, generation, ttl_ms, nbytes, marks, address)


@dataclass(frozen=True, slots=True)
class PullRequest:
    """`budget_ms`: what is left of the asker's deadline; `nbytes`: the size it has room for."""

    key: bytes
    digest: bytes
    generation: int
    budget_ms: int
    nbytes: int

    def pack(self) -> bytes:
        return _PULL.pack(self.key, self.digest, self.generation, self.budget_ms, self.nbytes)

    @staticmethod
    def unpack(data: bytes) -> PullRequest:
        try:
            return PullRequest(*_PULL.unpack(data))
        except struct.error as cause:
            raise WireError(f"not a pull request: {cause}") from cause


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """Head of the answer to a pull; `nbytes` of window follow when `status` is HELD.

    checksum: xxh3_128 of the window; ttl_ms: what is left of its life.
    """

    status: int
    approximate: bool
    replay_generation: int
    n_blocks: int
    ttl_ms: int
    nbytes: int
    checksum: bytes

    def pack(self) -> bytes:
        return _ANSWER.pack(
            self.status,
            self.approximate,
            self.replay_generation,
            self.n_blocks,
            self.ttl_ms,
            self.nbytes,
            self.checksum,
        )

    @staticmethod
    def unpack(data: bytes) -> PullAnswer:
        try:
            status, fuzzy, generation, n_blocks, ttl_ms, nbytes, checksum = _ANSWER.unpack(data)
        except struct.error as cause:
            raise WireError(f"not an answer to a pull: {cause}") from cause
        return PullAnswer(status, bool(fuzzy), generation, n_blocks, ttl_ms, nbytes, checksum)

    @staticmethod
    def refusal(status: int) -> PullAnswer:
        """An answer without a window."""
        return PullAnswer(status, False, 0, 0, 0, 0, bytes(16))


@dataclass(frozen=True, slots=True)
class StagedAnswer:
    """Answer to STAGE: where the window can be read by another transport.

    address: of its first byte in the holder's memory; session: the holder's name there.
    """

    answer: PullAnswer
    address: int = 0
    session: str = ""

    def pack(self) -> bytes:
        return self.answer.pack() + struct.pack("<Q", self.address) + self.session.encode()

    @staticmethod
    def unpack(data: bytes) -> StagedAnswer:
        """raises: WireError."""
        head, place = data[:ANSWER_BYTES], data[ANSWER_BYTES:]
        if len(place) < 8 or len(place) > 512:
            raise WireError("not an answer to a request to stage")
        session = place[8:].decode(errors="replace")
        return StagedAnswer(PullAnswer.unpack(head), int.from_bytes(place[:8], "little"), session)


class Session:
    """Keys and frame numbers of one connection, seen from one side."""

    def __init__(self, key: bytes, server_nonce: bytes, client_nonce: bytes, side: bytes) -> None:
        nonces = server_nonce + client_nonce
        self._key = hmac.digest(key, b"session" + nonces, "sha256")
        self._mine = side
        self._theirs = SERVER if side == CLIENT else CLIENT
        self._sent = 0
        self._received = 0

    def seal(self, kind: int, body: bytes) -> bytes:
        """A frame ready to be sent."""
        if len(body) > MAX_BODY_BYTES:
            raise WireError(f"a frame holds {MAX_BODY_BYTES} bytes, got {len(body)}")
        tag = self._tag(self._mine, self._sent, kind, body)
        self._sent += 1
        return _HEAD.pack(len(body), kind, tag) + body

    def open(self, head: bytes, body: bytes) -> int:
        """Check a received frame; returns its kind. raises: WireError."""
        _, kind, tag = _HEAD.unpack(head)
        expected = self._tag(self._theirs, self._received, kind, body)
        if not hmac.compare_digest(tag, expected):
            raise WireError("a frame is not from the peer that was authenticated")
        self._received += 1
        return kind

    def bulk_hasher(self, *, sending: bool) -> blake3:
        """For the bytes of the next bulk frame in one direction; its first 16 bytes are the tag."""
        side, number = (self._mine, self._sent) if sending else (self._theirs, self._received)
        if sending:
            self._sent += 1
        else:
            self._received += 1
        hasher = blake3(key=self._key)
        hasher.update(b"bulk" + side + struct.pack("<Q", number))
        return hasher

    def _tag(self, side: bytes, number: int, kind: int, body: bytes) -> bytes:
        message = side + struct.pack("<QB", number, kind) + body
        return hmac.digest(self._key, message, "sha256")[:TAG_BYTES]


def body_length(head: bytes) -> int:
    """Length of the body that follows a frame head. raises: WireError beyond the limit."""
    length = int(_HEAD.unpack(head)[0])
    if length > MAX_BODY_BYTES:
        raise WireError(f"a frame of {length} bytes; at most {MAX_BODY_BYTES} are taken")
    return length


def new_nonce() -> bytes:
    """32 unpredictable bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What only a holder of the shared key can answer."""
    name = b"client" if side == CLIENT else b"server"
    return hmac.digest(key, name + server_nonce + client_nonce, "sha256")


def check_proof(
    key: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes, got: bytes
) -> None:
    """raises: WireError when the other side does not know the key."""
    if not hmac.compare_digest(proof(key, side, server_nonce, client_nonce), got):
        raise WireError("the peer does not know the shared key")


def join_address(host: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"


def split_records(body: bytes, size: int) -> list[bytes]:
    """A body as equal pieces. raises: WireError when it does not divide."""
    if len(body) % size:
        raise WireError(f"a body of {len(body)} bytes is no list of {size}-byte items")
    return [body[i : i + size] for i in range(0, len(body), size)]
