"""Writing records again elsewhere: what lives in dying segments, and what changes its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.io import is_full
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.store.encoded import EncodedRecord, Origin
from deepinfer_kvtier.upkeep.survey import SegmentState, alive_rows, rows_by_segment

COPY_SHARE = 0.05
"""Share of the time between two collections that copying may take."""

_BATCH = 64
DAMAGED = ("no trailer", "wrong checksum")
"""What `read_slot` says of bytes that have changed, in contrast to some that are not there."""


def copy_forward(directory: DirectoryTier, states: Sequence[SegmentState]) -> tuple[int, int]:
    """Write the living records of these segments again and mark the segments as moved.

    Stops between two segments when the share of time is used up; the others wait for the next
    collection; so it does on a full disk. A record that cannot be read any more is left behind: it
    would be a miss anyway.
    returns: records, and bytes of the new slots. raises: OSError.
    """
    if not states:
        return 0, 0
    deadline = directory.clock.monotonic() + COPY_SHARE * directory.since_collected_s()
    stored = directory.index.stored_rows()
    by_segment = rows_by_segment(stored)
    records = copied = 0
    for state in states:
        if directory.segments.get(state.local).moved:
            continue  # somebody leased it before its file could go
        # Readers may have found the last of its records damaged since the survey.
        rows = alive_rows(directory, state.cls, by_segment.get(state.local, stored[:0]))
        try:
            for record in copy_records(directory, directory, rows, state.cls):
                records += 1
                copied += fmt.slot_bytes(record.nbytes)
                directory.counts["gc_copied_payload_bytes"] += record.nbytes
        except OSError as cause:
            if not is_full(cause):
                raise
            break
        directory.segments.get(state.local).moved = True
        if directory.clock.monotonic() >= deadline:
            break
    return records, copied


def copy_records(
    source: DirectoryTier,
    target: DirectoryTier,
    rows: NDArray[Any],
    cls: str,
    change: Callable[[EncodedRecord], EncodedRecord] = lambda record: record,
) -> Iterator[EncodedRecord]:
    """Write the records of one segment again, in their order; yields those that were readable.

    change: what to make of each of them first. raises: OSError.
    """
    rows.sort(order="page")
    read = (_read(source, row, cls, keep_time=True) for row in rows)
    for batch in _batches(record and change(record) for record in read):
        target.put_from(batch)
        yield from batch


def reclassify(directory: DirectoryTier, rows: NDArray[Any], cls: str) -> int:
    """Write records again under another class, where their lifetime starts now.

    The old copies are hidden once the new ones are on disk. returns: how many records moved; those
    that are in the class already, or cannot be read, stay as they are. raises: OSError.
    """
    code = directory.config.classes[cls].code
    rows = rows[rows["cls"] != code]
    rows.sort(order=["segment", "page"])
    moved = 0
    for batch in _batches(_read(directory, row, cls, keep_time=False) for row in rows):
        directory.replace(batch)
        moved += len(batch)
    return moved


def _batches(records: Iterable[EncodedRecord | None]) -> Iterator[list[EncodedRecord]]:
    batch: list[EncodedRecord] = []
    for record in records:
        if record is not None:
            batch.append(record)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _read(directory: DirectoryTier, row: Any, cls: str, *, keep_time: bool) -> EncodedRecord | None:
    """A stored record, verified, ready to be written again; None when it is not what it should be.

    keep_time: the new copy is as old as the last use of this one, so that neither its lifetime
               nor its order with tombstones changes.
    """
    read = read_slot(directory, row)
    if isinstance(read, str):
        directory.counts["corrupt"] += read in DAMAGED
        return None
    trailer, payload = read
    seen_s = int(row["seen_s"])
    used_ms = trailer.created_ms if seen_s <= trailer.created_ms // 1000 else seen_s * 1000
    known = directory.config.classes.get(cls)
    origin = Origin(
        kind=trailer.kind,
        shard=trailer.shard,
        cls=cls,
        cls_code=trailer.cls if known is None else known.code,
        fingerprint=trailer.fingerprint,
        namespace=trailer.namespace,
        approximate=bool(trailer.flags & fmt.FLAG_APPROXIMATE),
        generation=trailer.generation,
    )
    return EncodedRecord(
        origin,
        trailer.digest,
        trailer.parent,
        trailer.depth,
        [payload],
        trailer.payload_bytes,
        checksum=trailer.checksum,
        created_ms=used_ms if keep_time else None,
        extra=trailer.extra,
        expanded_bytes=trailer.expanded_bytes,
        sealed=bool(trailer.flags & fmt.FLAG_SEALED),
    )


def read_slot(directory: DirectoryTier, row: Any) -> tuple[fmt.Trailer, memoryview] | str:
    """Trailer and payload of a stored record, or in words why it is bad."""
    payload = int(row["length"])
    slot = bytearray(fmt.slot_bytes(payload))
    local = int(row["segment"])
    try:
        fd = directory.segments.acquire(local)
        if fd is None:
            return "file missing"
        try:
            got = directory.io.preadv(fd, [slot], int(row["page"]) * fmt.PAGE)
        finally:
            directory.segments.release(local)
    except OSError as error:
        return f"read error: {error.strerror}"
    if got < len(slot):
        return "cut short"
    at = fmt.trailer_offset(payload)
    trailer = fmt.parse_trailer(memoryview(slot)[at : at + fmt.TRAILER_BYTES])
    if trailer is None:
        return "no trailer"
    same = (trailer.kind, trailer.shard, trailer.payload_bytes) == (
        int(row["kind"]),
        int(row["shard"]),
        payload,
    )
    if trailer.digest[:16] != fmt.key_bytes(row) or not same:
        return "another record"
    if checksum_of([memoryview(slot)[:payload]]) != trailer.checksum:
        return "wrong checksum"
    return trailer, memoryview(slot)[:payload]
