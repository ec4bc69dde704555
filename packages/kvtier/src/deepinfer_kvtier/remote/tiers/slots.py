"""One record as remote tiers keep it: the same slot as in a segment file, verified on every read.

A slot is payload | zero padding to 8 | 192-byte trailer | zero padding. The trailer names the full
digest and the checksum of the payload, so a tier that hands out foreign, stale, cut or damaged
bytes causes a miss and never a wrong answer.
"""

from __future__ import annotations

from collections import Counter

from deepinfer_kvtier.base.buffers import checksum_of, scatter_into
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.flow.compression import open_compressed
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.reading import Wanted


def trailer_of(record: EncodedRecord, *, now_ms: int, sequence: int) -> fmt.Trailer:
    """What a slot says about a record."""
    origin = record.origin
    return fmt.Trailer(
        kind=origin.kind,
        cls=origin.cls_code,
        flags=_flags(record),
        payload_bytes=record.nbytes,
        depth=record.depth,
        digest=record.digest,
        parent=record.parent,
        fingerprint=origin.fingerprint,
        created_ms=now_ms,
        sequence=sequence,
        checksum=record.checksum or checksum_of(record.views),
        generation=origin.generation,
        shard=origin.shard,
        namespace=origin.namespace,
        extra=record.extra,
        expanded_bytes=record.expanded_bytes,
    )


def pack_slot(record: EncodedRecord, *, now_ms: int, sequence: int) -> list[memoryview]:
    """Buffers of one slot of a segment, payload first and uncopied."""
    trailer = trailer_of(record, now_ms=now_ms, sequence=sequence).pack()
    gap = fmt.trailer_offset(record.nbytes) - record.nbytes
    tail = (b"\0" * gap + trailer).ljust(fmt.slot_bytes(record.nbytes) - record.nbytes, b"\0")
    return [*(view for view in record.views if view.nbytes), memoryview(tail)]


def open_slot(
    payload: memoryview,
    trailer_bytes: memoryview,
    want: Wanted,
    kind: int,
    shard: int,
    counts: Counter[str],
) -> Status:
    """Copy a payload to its destination, expanding it if it is compressed, and verify it.

    OK only when trailer, digest, kind, shard, length and checksum are all as asked.
    """
    if trailer_bytes.nbytes < fmt.TRAILER_BYTES:
        counts["short_reads"] += 1
        return Status.MISS
    trailer = fmt.parse_trailer(trailer_bytes)
    if trailer is None:
        counts["corrupt"] += 1
        return Status.CORRUPT
    if payload.nbytes < trailer.payload_bytes:
        counts["short_reads"] += 1
        return Status.MISS
    payload = payload[: trailer.payload_bytes]
    if trailer.compressed:
        status = open_compressed(payload, trailer, want, kind, shard, counts)
        return Status.MISS if status is Status.SKIPPED else status
    expected = (want.digest, kind, shard, want.nbytes)
    if (trailer.digest, trailer.kind, trailer.shard, trailer.payload_bytes) != expected:
        counts["digest_mismatch"] += 1
        return Status.MISS
    scatter_into(want.views, payload)
    # Over the destination, not over `payload`: the sum then also covers the copy.
    if checksum_of(want.views) != trailer.checksum:
        counts["corrupt"] += 1
        return Status.CORRUPT
    want.parent = trailer.parent
    want.depth = trailer.depth
    want.checksum = trailer.checksum
    want.approximate = bool(trailer.flags & fmt.FLAG_APPROXIMATE)
    want.generation = trailer.generation
    want.seal = trailer.extra if trailer.flags & fmt.FLAG_SEALED else b""
    counts["read_records"] += 1
    counts["read_bytes"] += want.nbytes
    return Status.OK


def _flags(record: EncodedRecord) -> int:
    flags = record.origin.approximate * fmt.FLAG_APPROXIMATE | record.sealed * fmt.FLAG_SEALED
    return flags | bool(record.expanded_bytes) * fmt.FLAG_COMPRESSED
