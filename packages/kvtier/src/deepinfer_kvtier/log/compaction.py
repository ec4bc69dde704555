"""Live data by segment: how much there is, and writing it again elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.config import KVTierConfig, RetentionClass
from deepinfer_kvtier.base.files import is_full
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.format import EncodedRecord, Origin
from deepinfer_kvtier.log.segments import is_writer, parse_segment_name


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """What decides over a segment.

    bytes:         what its file occupies.
    records:       those the index knows, further copies of a record included.
    alive_bytes:   slots of the records whose lifetime is not over.
    last_seen_s:   newest use of any of its records; 0 when it has none left.
    youngest_floor: whether that is below the age at which an eviction counts as early.
    deletable:     no other process appends to it; one that grows here is sealed first.
    growing:       this process appends to it.
    """

    local: int
    cls: str
    bytes: int
    records: int
    alive_bytes: int
    last_seen_s: int
    youngest_floor: bool
    deletable: bool
    growing: bool


@dataclass(frozen=True, slots=True)
class FolderStats:
    """All segments, and the bytes of everything in the folder, whoever put it there.

    in_grace_bytes: of that, files that are promised to be deleted and wait for the end of their
                    grace.
    """

    total_bytes: int
    in_grace_bytes: int
    states: list[SegmentStats]

    def bytes_of(self, cls: str) -> int:
        """Bytes of the segments of one class."""
        return sum(state.bytes for state in self.states if state.cls == cls)


def collect_stats(disk: DiskTier) -> FolderStats:
    """raises: OSError."""
    config = disk.config
    now = disk.clock.wall()
    # Files before rows: a segment may gain records meanwhile, but never seem to have lost them.
    total, in_grace, sizes = (0, 0, Counter[int]()) if disk.liveness.shared else _sizes(disk)
    by_segment = rows_by_segment(disk.index.stored_rows())
    if disk.liveness.shared:
        # What a mounted file system says of sizes may be old: the index knows better.
        total, in_grace, sizes = _indexed_sizes(disk, by_segment)
    logs = disk.logs()
    states: list[SegmentStats] = []
    for segment in disk.segments.all():
        if segment.tombstoned:
            continue  # its file waits for the end of its grace
        members = by_segment.get(segment.local)
        seen = int(members["seen_s"].max()) if members is not None else 0
        writer_name = segment.writer.hex()
        ended = writer_name in logs and logs[writer_name].ended
        mine = writer_name == disk.writer_name
        growing = disk.is_growing(segment)
        finished = not (growing and members is None) and (segment.sealed or ended or mine)
        states.append(
            SegmentStats(
                local=segment.local,
                cls=segment.cls,
                bytes=sizes[segment.local],
                records=0 if members is None else len(members),
                alive_bytes=0 if members is None else _alive_bytes(disk, segment.cls, members),
                last_seen_s=seen,
                youngest_floor=now - seen < config.floor_s,
                deletable=finished and not disk.segments.is_leased(segment),
                growing=growing,
            )
        )
    return FolderStats(total, in_grace, states)


def alive_rows(disk: DiskTier, cls: str, rows: NDArray[Any]) -> NDArray[Any]:
    """The rows of one class whose lifetime is not over."""
    policy = disk.config.classes.get(cls)
    if policy is None or policy.ttl_s is None:
        return rows
    return rows[disk.clock.wall() - rows["seen_s"].astype(np.float64) < policy.ttl_s]


def rows_by_segment(rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Rows grouped by the number of their segment in this process."""
    if not len(rows):
        return {}
    ordered = rows[np.argsort(rows["segment"], kind="stable")]
    numbers, starts = np.unique(ordered["segment"], return_index=True)
    return {
        int(number): part
        for number, part in zip(numbers, np.split(ordered, starts[1:]), strict=True)
    }


def writer_folders(disk: DiskTier) -> Iterator[str]:
    """Names of all writers' folders. raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        for name in disk.io.listdir(disk.root / "w"):
            if is_writer(name):
                yield name


def _alive_bytes(disk: DiskTier, cls: str, rows: NDArray[Any]) -> int:
    lengths, counts = np.unique(alive_rows(disk, cls, rows)["length"], return_counts=True)
    return sum(
        fmt.slot_bytes(int(n)) * int(count) for n, count in zip(lengths, counts, strict=True)
    )


def _indexed_sizes(
    disk: DiskTier, by_segment: dict[int, NDArray[Any]]
) -> tuple[int, int, Counter[int]]:
    """`_sizes` as the index has it; a segment is as large as its records ever were."""
    sizes = Counter[int]()
    in_grace = 0
    for local, rows in by_segment.items():
        lengths, counts = np.unique(rows["length"], return_counts=True)
        slots = zip(lengths, counts, strict=True)
        size = fmt.PAGE + sum(fmt.slot_bytes(int(n)) * int(count) for n, count in slots)
        segment = disk.segments.get(local)
        segment.bytes = max(segment.bytes, size)
    for segment in disk.segments.all():
        sizes[segment.local] = segment.bytes
    for segment in disk.segments.tombstoned():
        in_grace += segment.bytes
        sizes[segment.local] = segment.bytes
    frames = disk.own_log_frames + sum(log.frames for log in disk.logs().values())
    return sizes.total() + frames * fmt.PAGE + _foreign_bytes(disk), in_grace, sizes


def _sizes(disk: DiskTier) -> tuple[int, int, Counter[int]]:
    """Bytes of everything in the folder, of what waits for its grace, of each segment by number."""
    total = in_grace = 0
    sizes: Counter[int] = Counter()
    for name in writer_folders(disk):
        writer = bytes.fromhex(name)
        folder = disk.root / "w" / name
        with contextlib.suppress(FileNotFoundError, PermissionError):
            disk.segments.discover(writer)
            for file in disk.io.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    size = disk.io.disk_bytes(folder / file)
                    parsed = parse_segment_name(file)
                    segment = disk.segments.named(writer, parsed[2]) if parsed else None
                    total += size
                    if segment is not None:
                        sizes[segment.local] = size
                        in_grace += size if segment.tombstoned else 0
    return total + _foreign_bytes(disk), in_grace, sizes


def _foreign_bytes(disk: DiskTier) -> int:
    """Bytes of what lies in the folder besides the folders of writers."""
    total = 0
    writers = disk.root / "w"
    for path, folders, files in os.walk(disk.root):
        if path == str(writers):
            folders[:] = [name for name in folders if not is_writer(name)]
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, file)).st_blocks * 512
    return total


SPARSE_SHARE = 0.2
"""Below this share of living bytes a segment is rewritten instead of kept."""


def choose_expired(
    states: Iterable[SegmentStats], classes: Mapping[str, RetentionClass], now_s: float
) -> list[SegmentStats]:
    """Segments whose every record is past its time to live; unknown classes never expire."""
    gone: list[SegmentStats] = []
    for state in states:
        policy = classes.get(state.cls)
        lives_s = None if policy is None else policy.ttl_s
        expired = lives_s is not None and now_s - state.last_seen_s >= lives_s
        if state.deletable and (state.records == 0 or expired):
            gone.append(state)
    return gone


def choose_sparse(states: Iterable[SegmentStats]) -> list[SegmentStats]:
    """Segments mostly dead: their living records move, emptiest first, and the file goes."""
    sparse = [
        state
        for state in states
        if state.deletable
        and not state.growing
        and 0 < state.alive_bytes < SPARSE_SHARE * state.bytes
    ]
    return sorted(sparse, key=lambda state: state.alive_bytes / state.bytes)


def choose_victims(
    states: Iterable[SegmentStats],
    excess_bytes: int,
    ranks: Mapping[str, int],
    kept_bytes: Mapping[int, int] = MappingProxyType({}),
) -> list[SegmentStats]:
    """Segments to evict until `excess_bytes` are free: lowest rank first, then longest unused.

    Classes without an entry in `ranks` (those that never expire) are never evicted.
    kept_bytes: what is written again of a segment, by its number.
    """
    candidates = [state for state in states if state.deletable and state.cls in ranks]
    candidates.sort(key=lambda state: (ranks[state.cls], state.last_seen_s))
    victims: list[SegmentStats] = []
    for state in candidates:
        if excess_bytes <= 0:
            break
        victims.append(state)
        excess_bytes -= state.bytes - kept_bytes.get(state.local, 0)
    return victims


def class_ranks(classes: Mapping[str, RetentionClass]) -> dict[str, int]:
    """Shorter-lived classes are evicted first."""
    mortal = [(policy.ttl_s, name) for name, policy in classes.items() if policy.ttl_s is not None]
    return {name: rank for rank, (_, name) in enumerate(sorted(mortal))}


def over_limit(config: KVTierConfig, quota: int | None, used: int) -> int:
    """Bytes to free: none up to the high-water mark, down to the low one above it."""
    if quota is None or used <= config.high_water * quota:
        return 0
    return used - int(config.low_water * quota)


def over_class_quotas(
    config: KVTierConfig, stats: FolderStats, kept_bytes: Mapping[int, int] = MappingProxyType({})
) -> tuple[list[SegmentStats], dict[str, int]]:
    """Victims within classes that have a quota, and by class the bytes that no victim can free."""
    ranks = class_ranks(config.classes)
    victims: list[SegmentStats] = []
    stuck: dict[str, int] = {}
    for cls, quota in config.class_quotas.items():
        members = [state for state in stats.states if state.cls == cls]
        excess = over_limit(config, quota, stats.bytes_of(cls))
        chosen = choose_victims(members, excess, ranks, kept_bytes)
        left = excess - sum(state.bytes - kept_bytes.get(state.local, 0) for state in chosen)
        if left > 0:
            stuck[cls] = left
        victims.extend(chosen)
    return victims, stuck


COPY_SHARE = 0.05
"""Share of the time between two collections that copying may take."""

_BATCH = 64


class UnreadableError(OSError):
    """A record could not be read now; it may be as good as ever, so it stays where it is."""


DAMAGED = ("no trailer", "wrong checksum")
"""What `read_slot` says of bytes that have changed, in contrast to some that are not there."""

READ_ERROR = "read error"
"""What `read_slot` begins with where nothing can be said: the record may be as good as ever."""


def copy_forward(disk: DiskTier, states: Sequence[SegmentStats]) -> tuple[int, int]:
    """Write the living records of these segments again and mark the segments as moved.

    Stops between two segments when the share of time is used up; the others wait for the next
    collection; so it does on a full disk. A record that cannot be read any more is left behind: it
    would be a miss anyway.
    returns: records, and bytes of the new slots. raises: OSError.
    """
    if not states:
        return 0, 0
    deadline = disk.clock.monotonic() + COPY_SHARE * disk.since_collected_s()
    stored = disk.index.stored_rows()
    by_segment = rows_by_segment(stored)
    records = copied = 0
    for state in states:
        if disk.segments.get(state.local).moved:
            continue  # another process leased it before its file could go
        # Readers may have found the last of its records damaged since the survey.
        rows = alive_rows(disk, state.cls, by_segment.get(state.local, stored[:0]))
        try:
            for record in copy_records(disk, disk, rows, state.cls):
                records += 1
                copied += fmt.slot_bytes(record.nbytes)
                disk.counts["gc_copied_payload_bytes"] += record.nbytes
        except UnreadableError:
            disk.counts["gc_unreadable_segments"] += 1
            continue
        except OSError as cause:
            if not is_full(cause):
                raise
            break
        disk.segments.get(state.local).moved = True
        if disk.clock.monotonic() >= deadline:
            break
    return records, copied


def copy_records(
    source: DiskTier,
    target: DiskTier,
    rows: NDArray[Any],
    cls: str,
    change: Callable[[EncodedRecord], EncodedRecord] = lambda record: record,
    *,
    leave_unreadable: bool = False,
) -> Iterator[EncodedRecord]:
    """Write the records of one segment again, in their order; yields those that were readable.

    change: what to make of each of them first.
    raises: OSError; UnreadableError for one that cannot be read now, unless it may be left out.
    """
    rows.sort(order="page")
    strict = not leave_unreadable
    read = (_read(source, row, cls, keep_time=True, strict=strict) for row in rows)
    for batch in _batches(record and change(record) for record in read):
        target.put_from(batch)
        yield from batch


def reclassify(disk: DiskTier, rows: NDArray[Any], cls: str) -> int:
    """Write records again under another class, where their lifetime starts now.

    The old copies are hidden once the new ones are on disk. returns: how many records moved; those
    that are in the class already, or cannot be read, stay as they are. raises: OSError.
    """
    code = disk.config.classes[cls].code
    rows = rows[rows["cls"] != code]
    rows.sort(order=["segment", "page"])
    moved = 0
    for batch in _batches(_read(disk, row, cls, keep_time=False) for row in rows):
        disk.replace(batch)
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


def _read(
    disk: DiskTier, row: Any, cls: str, *, keep_time: bool, strict: bool = False
) -> EncodedRecord | None:
    """A stored record, verified, ready to be written again; None when it is not what it should be.

    keep_time: the new copy is as old as the last use of this one, so that neither its lifetime
               nor its order with tombstones changes.
    """
    read = read_slot(disk, row)
    if isinstance(read, str):
        if strict and read.startswith(READ_ERROR):
            raise UnreadableError(errno.EIO, read)
        disk.counts["corrupt"] += read in DAMAGED
        return None
    trailer, payload = read
    seen_s = int(row["seen_s"])
    used_ms = trailer.created_ms if seen_s <= trailer.created_ms // 1000 else seen_s * 1000
    known = disk.config.classes.get(cls)
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


def read_slot(disk: DiskTier, row: Any) -> tuple[fmt.Trailer, memoryview] | str:
    """Trailer and payload of a stored record, or in words why it is bad."""
    payload = int(row["length"])
    slot = bytearray(fmt.slot_bytes(payload))
    local = int(row["segment"])
    try:
        fd = disk.segments.acquire(local)
        if fd is None:
            return "file missing"
        at = int(row["page"]) * fmt.PAGE
        try:
            try:
                got = disk.io.preadv(fd, [slot], at)
            except OSError:
                fd = disk.segments.reopen(local)
                if fd is None:
                    return "file missing"
                got = disk.io.preadv(fd, [slot], at)
        finally:
            disk.segments.release(local)
    except OSError as error:
        return f"{READ_ERROR}: {error.strerror}"
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
