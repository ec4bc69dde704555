"""Bytes on disk: segment header, slot trailer, index frame. All numbers are little endian.

Segment file      4,096-byte header, then slots.
Slot              payload at a 4,096-aligned offset | zero padding to 8 | 192-byte trailer | zeros
                  to 4,096. The trailer lies behind the payload, so a torn write shows as a missing
                  trailer.
Index log         frames of 4,096 bytes: 64-byte header + up to 63 entries of 64 bytes. A frame is
                  appended for every commit and never rewritten.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import checksums_of

PAGE: Final = 4096
FORMAT_VERSION: Final = 1
# Trailers of compressed records: an earlier release finds no trailer there, never another payload.
COMPRESSED_FORMAT: Final = 2

SEGMENT_MAGIC: Final = b"KVTSEG1\0"
TRAILER_MAGIC: Final = b"KVTSLOT1"
FRAME_MAGIC: Final = b"KVTIDX1\0"

# magic, format, class code, bucket start, segment number, store uuid, writer id
_SEGMENT_HEADER = struct.Struct("<8sHBxxxxxQI16s16s")
# magic, format, kind, class, flags, payload length, depth, digest, parent, fingerprint,
# created in ms, sequence, xxh3_128, part sums or seal, replay generation, shard, namespace,
# bytes when expanded, reserved
_TRAILER_BODY = struct.Struct("<8sHBBIII32s16s8sQQ16s64sBBII2x")
_PART_SUMS = struct.Struct("<8Q")
MAX_PART_SUMS: Final = 8
_CRC = struct.Struct("<I")
TRAILER_BYTES: Final = _TRAILER_BODY.size + _CRC.size
# magic, frame number, count, crc32, low half of the store uuid, writer id
_FRAME_HEADER = struct.Struct("<8sQII8s16s16x")
_FRAME_CRC_AT: Final = 20
ENTRIES_PER_FRAME: Final = 63

ENTRY: Final = np.dtype(
    [
        ("key_lo", "<u8"),
        ("key_hi", "<u8"),
        ("parent", "<u8"),
        ("segment", "<u4"),
        ("page", "<u4"),
        ("length", "<u4"),
        ("kind", "u1"),
        ("cls", "u1"),
        ("flags", "<u2"),
        ("created_s", "<u4"),
        ("depth", "<u4"),
        ("sum", "<u8"),
        ("shard", "u1"),
        ("generation", "u1"),
        ("created_ms", "<u2"),
        ("namespace", "<u4"),
    ]
)

TRAILER: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("format", "<u2"),
        ("kind", "u1"),
        ("cls", "u1"),
        ("flags", "<u4"),
        ("length", "<u4"),
        ("depth", "<u4"),
        ("digest", "u1", 32),
        ("parent", "u1", 16),
        ("fingerprint", "u1", 8),
        ("created_ms", "<u8"),
        ("sequence", "<u8"),
        ("checksum", "u1", 16),
        ("extra", "u1", 64),
        ("generation", "u1"),
        ("shard", "u1"),
        ("namespace", "<u4"),
        ("expanded", "<u4"),
        ("reserved", "u1", 2),
        ("crc", "<u4"),
    ]
)
TRAILER_WORD: Final = int.from_bytes(TRAILER_MAGIC, "little")

Size = TypeVar("Size", int, NDArray[np.int64])

FLAG_APPROXIMATE: Final = 1
FLAG_SEALED: Final = 256  # in trailers: the payload is encrypted, `extra` opens it
FLAG_COMPRESSED: Final = 512  # in trailers: the payload is a table of parts and their stored bytes
FLAG_TOMB_KEY: Final = 2
FLAG_TOMB_SEGMENT: Final = 4
FLAG_SEAL: Final = 8
FLAG_TOUCH: Final = 16
FLAG_LOG_END: Final = 32
FLAG_SEGMENT: Final = 64  # a segment begins: its number, class, and bucket start in `created_s`
CONTROL_FLAGS: Final = (
    FLAG_TOMB_KEY | FLAG_TOMB_SEGMENT | FLAG_SEAL | FLAG_TOUCH | FLAG_LOG_END | FLAG_SEGMENT
)


def page_align(size: Size) -> Size:
    """Round up to a multiple of 4,096."""
    return (size + PAGE - 1) & ~(PAGE - 1)


def trailer_offset(payload_bytes: Size) -> Size:
    """Where the trailer of a slot starts, from the start of the slot."""
    return (payload_bytes + 7) & ~7


def slot_bytes(payload_bytes: Size) -> Size:
    """Bytes of a whole slot."""
    return page_align(trailer_offset(payload_bytes) + TRAILER_BYTES)


@dataclass(frozen=True, slots=True)
class Trailer:
    """What a slot says about its payload.

    payload_bytes:  as stored; `expanded_bytes`: of a compressed record once it is expanded, else 0.
    """

    kind: int
    cls: int
    flags: int
    payload_bytes: int
    depth: int
    digest: bytes
    parent: bytes
    fingerprint: bytes
    created_ms: int
    sequence: int
    checksum: bytes
    generation: int
    shard: int
    namespace: int = 0
    extra: bytes = bytes(64)
    expanded_bytes: int = 0

    @property
    def compressed(self) -> bool:
        """Whether the payload has to be expanded."""
        return bool(self.flags & FLAG_COMPRESSED)

    def pack(self) -> bytes:
        body = _TRAILER_BODY.pack(
            TRAILER_MAGIC,
            COMPRESSED_FORMAT if self.compressed else FORMAT_VERSION,
            self.kind,
            self.cls,
            self.flags,
            self.payload_bytes,
            self.depth,
            self.digest,
            self.parent[:16],
            self.fingerprint[:8],
            self.created_ms,
            self.sequence,
            self.checksum,
            self.extra,
            self.generation,
            self.shard,
            self.namespace,
            self.expanded_bytes,
        )
        return body + _CRC.pack(zlib.crc32(body))


def parse_trailer(raw: bytes | bytearray | memoryview) -> Trailer | None:
    """The trailer in these 192 bytes; None when they are not one, or damaged."""
    if len(raw) < TRAILER_BYTES:
        return None
    body = raw[: _TRAILER_BODY.size]
    (crc,) = _CRC.unpack_from(raw, _TRAILER_BODY.size)
    if bytes(body[:8]) != TRAILER_MAGIC or zlib.crc32(body) != crc:
        return None
    fields = _TRAILER_BODY.unpack(body)
    (_, version, kind, cls, flags, payload, depth, digest, parent, fp, ms, seq, checksum) = fields[
        :13
    ]
    if version != (COMPRESSED_FORMAT if flags & FLAG_COMPRESSED else FORMAT_VERSION):
        return None
    return Trailer(
        kind,
        cls,
        flags,
        payload,
        depth,
        digest,
        parent,
        fp,
        ms,
        seq,
        checksum,
        fields[14],
        fields[15],
        fields[16],
        fields[13],
        fields[17],
    )


def seal_trailers(raw: bytearray) -> None:
    """Set the CRC of each of these trailers, one behind the other."""
    view = memoryview(raw)
    for at in range(0, len(raw), TRAILER_BYTES):
        end = at + _TRAILER_BODY.size
        _CRC.pack_into(raw, end, zlib.crc32(view[at:end]))


def pack_part_sums(sums: Sequence[int]) -> bytes:
    """Sums of up to eight parts as a trailer carries them."""
    return _PART_SUMS.pack(*sums, *([0] * (MAX_PART_SUMS - len(sums))))


def part_sums(extra: bytes) -> tuple[int, ...]:
    """The eight xxh3_64 sums of parts in the `extra` of a trailer; 0 = no such part."""
    return _PART_SUMS.unpack(extra)


def trailers_in(raw: bytearray, step: int, at: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The trailers at `raw[at]`, `raw[at + step]`, ...: rows of TRAILER, and which are intact."""
    cells = np.frombuffer(raw, dtype=np.uint8).reshape(-1, step)[:, at : at + TRAILER_BYTES]
    packed = cells.tobytes()
    rows: NDArray[Any] = np.frombuffer(packed, dtype=TRAILER)
    starts = range(0, len(packed), TRAILER_BYTES)
    crcs = [zlib.crc32(packed[start : start + _TRAILER_BODY.size]) for start in starts]
    intact = rows["crc"] == np.array(crcs, dtype=np.uint32)
    intact &= (rows["magic"] == TRAILER_WORD) & (rows["format"] == FORMAT_VERSION)
    return rows, intact


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """First page of a segment file."""

    cls: int
    bucket: int
    number: int
    store: bytes
    writer: bytes

    def pack(self) -> bytes:
        body = _SEGMENT_HEADER.pack(
            SEGMENT_MAGIC,
            FORMAT_VERSION,
            self.cls,
            self.bucket,
            self.number,
            self.store,
            self.writer,
        )
        return (body + _CRC.pack(zlib.crc32(body))).ljust(PAGE, b"\0")


def pack_frames(
    entries: NDArray[Any], first_number: int, store: bytes, writer: bytes
) -> list[bytes]:
    """Entries as whole frames, numbered from `first_number`."""
    frames: list[bytes] = []
    for start in range(0, len(entries), ENTRIES_PER_FRAME):
        chunk = entries[start : start + ENTRIES_PER_FRAME]
        head = _FRAME_HEADER.pack(
            FRAME_MAGIC, first_number + len(frames), len(chunk), 0, store[:8], writer
        )
        frame = bytearray((head + chunk.tobytes()).ljust(PAGE, b"\0"))
        _CRC.pack_into(frame, _FRAME_CRC_AT, zlib.crc32(frame))
        frames.append(bytes(frame))
    return frames


def parse_frame(
    raw: bytes | bytearray | memoryview, number: int, store: bytes, writer: bytes
) -> NDArray[Any] | None:
    """Entries of one frame; None when it is torn, damaged, or belongs elsewhere."""
    if len(raw) < PAGE:
        return None
    magic, got_number, count, crc, got_store, got_writer = _FRAME_HEADER.unpack_from(raw)
    if (
        magic != FRAME_MAGIC
        or got_number != number
        or count > ENTRIES_PER_FRAME
        or got_store != store[:8]
        or got_writer != writer
    ):
        return None
    check = zlib.crc32(raw[:_FRAME_CRC_AT])
    check = zlib.crc32(b"\0\0\0\0", check)
    check = zlib.crc32(raw[_FRAME_CRC_AT + 4 : PAGE], check)
    if check != crc:
        return None
    return np.frombuffer(raw, dtype=ENTRY, count=count, offset=_FRAME_HEADER.size)


def key_columns(digests: list[bytes] | tuple[bytes, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The 16-byte addresses of digests as two uint64 columns."""
    flat: NDArray[Any] = np.frombuffer(b"".join(digests), dtype="<u8").reshape(len(digests), 4)
    return flat[:, 0], flat[:, 1]


def key_bytes(row: Any) -> bytes:
    """The 16-byte address in a row or entry."""
    return int(row["key_lo"]).to_bytes(8, "little") + int(row["key_hi"]).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Origin:
    """What all records of one put have in common.

    namespace:   `identity.namespace_tag` of the chain they belong to.
    approximate: computed from windows that bounded replay had rebuilt, `generation` times.
    """

    kind: int
    shard: int
    cls: str
    cls_code: int
    fingerprint: bytes
    namespace: int
    approximate: bool = False
    generation: int = 0


@dataclass(slots=True, eq=False)
class EncodedRecord:
    """A record on its way to a tier. `views` must not change until it is written.

    nbytes:   bytes in `views`: what is stored.
    checksum: xxh3_128 of the bytes, known before the record is handed to the writer.
    content_checksum: of the bytes that were put, before they were compressed or encrypted.
    dropped:  a caller asked to forget the record while it was waiting; it must not be written.
    created_ms: time of a copy's last use, for records that are written again; None = now.
    extra: part sums or seal, 64 bytes or none, known with the checksum.
    sealed: the bytes in `views` are encrypted.
    expanded_bytes: of a compressed record before it was compressed; 0 for others.
    borrowed: `views` are memory of the caller, who might write to it in spite of what was agreed.
    changed:  the caller did: the record must not become visible.
    """

    origin: Origin
    digest: bytes
    parent: bytes
    depth: int
    views: Sequence[memoryview]
    nbytes: int
    checksum: bytes | None = None
    content_checksum: bytes | None = None
    dropped: bool = False
    created_ms: int | None = None
    extra: bytes = b""
    sealed: bool = False
    expanded_bytes: int = 0
    borrowed: bool = False
    changed: bool = False

    @property
    def kind(self) -> int:
        """Code of the kind: 0 block, 1 state."""
        return self.origin.kind

    @property
    def shard(self) -> int:
        """Index of the shard."""
        return self.origin.shard

    @property
    def cls(self) -> str:
        """Retention class."""
        return self.origin.cls

    @property
    def approximate(self) -> bool:
        """Computed from windows that bounded replay had rebuilt."""
        return self.origin.approximate

    @property
    def generation(self) -> int:
        """How many bounded replays lie behind it."""
        return self.origin.generation

    @property
    def verbatim(self) -> bool:
        """The stored bytes are those that were put."""
        return not (self.sealed or self.expanded_bytes)

    @property
    def content_bytes(self) -> int:
        """Bytes that were put."""
        return self.expanded_bytes or self.nbytes

    def checked(self) -> bytes:
        """The checksum, once it is known."""
        assert self.checksum is not None
        return self.checksum


def note_changes(batch: Sequence[EncodedRecord]) -> None:
    """Set `changed` where borrowed bytes are no longer those that were summed."""
    borrowed = [record for record in batch if record.borrowed and not record.changed]
    sums = checksums_of([list(record.views) for record in borrowed])
    for record, found in zip(borrowed, sums, strict=True):
        record.changed = found != record.checksum


def entries_of(batch: Sequence[EncodedRecord], now_ms: int) -> NDArray[Any]:
    """Index entries of records, all but segment and page."""
    entries = np.zeros(len(batch), dtype=ENTRY)
    if not len(batch):
        return entries
    entries["key_lo"], entries["key_hi"] = key_columns([record.digest for record in batch])
    entries["parent"] = np.frombuffer(b"".join([r.parent[:8] for r in batch]), dtype="<u8")
    entries["length"] = [record.nbytes for record in batch]
    entries["created_s"], entries["created_ms"] = divmod(_created_ms(batch, now_ms), 1000)
    entries["depth"] = [record.depth for record in batch]
    sums = b"".join([record.checked()[-8:] for record in batch])
    entries["sum"] = np.frombuffer(sums, dtype="<u8")
    for origin, some in _by_origin(batch):
        part = entries[some]
        part["kind"], part["shard"] = origin.kind, origin.shard
        part["cls"], part["namespace"] = origin.cls_code, origin.namespace
        part["flags"] = FLAG_APPROXIMATE if origin.approximate else 0
        part["generation"] = origin.generation
    return entries


def _by_origin(batch: Sequence[EncodedRecord]) -> Iterator[tuple[Origin, slice]]:
    """Runs of records of one put."""
    start = 0
    for origin, run in groupby(batch, key=attrgetter("origin")):
        end = start + len(list(run))
        yield origin, slice(start, end)
        start = end


def _created_ms(batch: Sequence[EncodedRecord], now_ms: int) -> NDArray[np.uint64]:
    times = [now_ms if record.created_ms is None else record.created_ms for record in batch]
    return np.array(times, dtype=np.uint64)


def trailers_of(batch: Sequence[EncodedRecord], now_ms: int, sequence: int) -> bytearray:
    """Trailers of records one behind the other; `sequence` is the number before the first."""
    trailers = np.zeros(len(batch), dtype=TRAILER)
    if not len(batch):
        return bytearray()
    trailers["magic"] = TRAILER_WORD
    trailers["format"] = FORMAT_VERSION
    trailers["length"] = [record.nbytes for record in batch]
    trailers["depth"] = [record.depth for record in batch]
    for name, column in (
        ("digest", [record.digest for record in batch]),
        ("parent", [record.parent[:16] for record in batch]),
        ("checksum", [record.checked() for record in batch]),
    ):
        flat: NDArray[Any] = np.frombuffer(b"".join(column), dtype=np.uint8)
        trailers[name] = flat.reshape(len(batch), -1)
    trailers["created_ms"] = _created_ms(batch, now_ms)
    trailers["sequence"] = np.arange(sequence + 1, sequence + 1 + len(batch))
    for origin, some in _by_origin(batch):
        part = trailers[some]
        part["kind"], part["shard"] = origin.kind, origin.shard
        part["cls"], part["namespace"] = origin.cls_code, origin.namespace
        part["flags"] = FLAG_APPROXIMATE if origin.approximate else 0
        part["generation"] = origin.generation
        part["fingerprint"] = np.frombuffer(origin.fingerprint[:8], dtype=np.uint8)
    for i, record in enumerate(batch):
        if record.sealed:
            trailers["flags"][i] |= FLAG_SEALED
        if record.expanded_bytes:
            trailers["format"][i] = COMPRESSED_FORMAT
            trailers["flags"][i] |= FLAG_COMPRESSED
            trailers["expanded"][i] = record.expanded_bytes
        if record.extra:
            trailers["extra"][i] = np.frombuffer(record.extra, dtype=np.uint8)
    raw = bytearray(trailers.tobytes())
    seal_trailers(raw)
    return raw
