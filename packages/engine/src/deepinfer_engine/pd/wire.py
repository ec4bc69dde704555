"""Frames and bodies of the protocol between router, prefill and decode workers.

    frame = u32 body length | u8 type | u8 version | u16 flags | u64 seq | body        little endian
    seq counts frames of one connection and direction from 0. Flag 1: the body is sealed.

Control bodies are msgpack maps, each as `schema.py` has it: a key it does not know is an error. A
UNIT body is a 64-byte header and raw bytes. Nothing here does IO; everything that can be wrong
about bytes from a peer raises TransferError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import msgpack
import xxhash

from deepinfer_engine.errors import TransferError

VERSION = 13
"""Of frames and of every message: peers of another version refuse each other."""
SEALED = 1
MAX_CONTROL_BYTES = 16 << 20
MAX_DATA_BYTES = 8 << 20
MAX_HELLO_BYTES = 64 << 10

FRAME = struct.Struct("<IBBHQ")
UNIT = struct.Struct("<QHHIIIIIQQI12x")
UNIT_HEADER_BYTES = 64
assert UNIT.size == UNIT_HEADER_BYTES

TAG_BYTES = 16
"""What sealing adds to a body."""

Body = dict[str, Any]


class FrameType(IntEnum):
    HELLO = 1
    WELCOME = 2
    IDENTITY = 3
    RESERVE = 10
    RESERVED = 11
    BUSY = 12
    PREFILL = 20
    FIRST = 21
    PIXELS = 22
    MASK_WANTED = 23
    MASK = 24
    PROMPT_LOGPROBS = 25
    STORED = 26
    LOADED = 27
    UNIT = 30
    COMMIT = 31
    READY = 32
    RELEASED = 33
    NACK = 34
    UNIT_AT = 35
    UNITS_READ = 36
    SHARED = 37
    SHARED_OPEN = 38
    HELD = 39
    TOKENS = 40
    LANDING_WANTED = 41
    LANDING = 42
    ABORT = 50
    ABORT_ACK = 51
    STATUS = 52
    STATUS_REPLY = 53
    HEARTBEAT = 60
    FLUSH = 61
    FLUSHED = 62
    PROBE = 63
    PROBED = 64
    PING = 65
    PONG = 66
    MEMBERS = 67
    DRAIN = 68
    CACHE = 69
    CACHE_WANTED = 80
    ENCODE = 81
    PIXELS_WANTED = 82
    PICTURE_PIXELS = 83
    EMBEDDED = 84
    NOT_EMBEDDED = 85
    GONE = 70
    STALE_EPOCH = 71
    UNSUPPORTED = 72


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """`type` is an int, not a FrameType: an unknown one must be answered, not fail to parse."""

    length: int
    type: int
    seq: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class Xid:
    """The key of every message: the client's request id and which attempt at it this is."""

    rid: str
    attempt: int

    @property
    def key(self) -> str:
        return f"{self.rid}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class UnitHeader:
    """Where the bytes of one unit belong.

    group 0: whole blocks `block_first ..` of the prompt, all layers.
    group 1: bytes of the state slot from offset `block_first`; `block_count` is 0.
    group 2: embeddings of a picture, from byte `block_first` of its rows; tokens are its own.
    token_first, token_count: the prompt tokens the bytes stand for.
    digest: xxh3 (64 bits) of the bytes.
    """

    grant_id: int
    attempt: int
    group: int
    unit: int
    block_first: int
    block_count: int
    token_first: int
    token_count: int
    nbytes: int
    digest: int

    def pack(self) -> bytes:
        return UNIT.pack(
            self.grant_id,
            self.attempt,
            self.group,
            self.unit,
            self.block_first,
            self.block_count,
            self.token_first,
            self.token_count,
            self.nbytes,
            self.digest,
            0,
        )

    @classmethod
    def unpack(cls, body: memoryview, *, elsewhere: bool = False) -> UnitHeader:
        """elsewhere: the bytes do not follow the header."""
        if len(body) < UNIT_HEADER_BYTES:
            raise TransferError(f"a unit starts with {UNIT_HEADER_BYTES} bytes, got {len(body)}")
        *fields, _flags = UNIT.unpack_from(body)
        header = cls(*fields)
        if elsewhere:
            if header.nbytes > MAX_DATA_BYTES:
                raise TransferError(f"unit {header.unit} announces {header.nbytes} bytes")
        elif header.nbytes != len(body) - UNIT_HEADER_BYTES:
            raise TransferError(
                f"unit {header.unit} announces {header.nbytes} bytes and carries "
                f"{len(body) - UNIT_HEADER_BYTES}"
            )
        return header


def pack_frame(kind: FrameType, seq: int, body_length: int, *, sealed: bool = False) -> bytes:
    """The 16 bytes before a body. TransferError when the body is over its limit."""
    _check_length(kind, body_length)
    return FRAME.pack(body_length, kind, VERSION, SEALED if sealed else 0, seq)


def unpack_frame(
    header: bytes | memoryview, expected_seq: int, limit: int = MAX_CONTROL_BYTES
) -> FrameHeader:
    """Check version, length and sequence of a peer's frame header."""
    length, kind, version, flags, seq = FRAME.unpack(header)
    if version != VERSION:
        raise TransferError(
            f"this worker speaks protocol version {VERSION}, the peer {version}: install the same "
            "release everywhere"
        )
    if flags & ~SEALED:
        raise TransferError(f"a frame has unknown flags {flags:#x}")
    if seq != expected_seq:
        raise TransferError(f"expected frame {expected_seq} of this connection, got {seq}")
    _check_length(kind, length, limit)
    return FrameHeader(length, kind, seq, bool(flags & SEALED))


def _check_length(kind: int, length: int, limit: int = MAX_CONTROL_BYTES) -> None:
    if kind == FrameType.UNIT:
        limit = min(limit, MAX_DATA_BYTES + UNIT_HEADER_BYTES + TAG_BYTES)
    elif kind in (FrameType.HELLO, FrameType.IDENTITY, FrameType.WELCOME):
        limit = MAX_HELLO_BYTES
    if length > limit:
        raise TransferError(f"a frame of type {kind} carries at most {limit} bytes, got {length}")


def pack_body(body: Mapping[str, Any]) -> bytes:
    return cast(bytes, msgpack.packb(body, use_bin_type=True))


def unpack_body(data: bytes | memoryview) -> Body:
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise TransferError(f"a control body is not msgpack: {error}") from None
    if not isinstance(body, dict):
        raise TransferError(f"a control body is a map, got {type(body).__name__}")
    return cast(Body, body)


def unit_digest(views: Iterable[memoryview]) -> int:
    """xxh3 (64 bits) over the concatenation of `views`; a copy of them takes longer."""
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def add_to_combined(combined: int, unit: int, digest: int) -> int:
    """Order-independent digest of units: sum mod 2^64 of digests mixed with their index."""
    mixed = xxhash.xxh64_intdigest(struct.pack("<QQ", digest, unit))
    return (combined + mixed) & 0xFFFFFFFFFFFFFFFF
