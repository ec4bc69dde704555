"""The one writer of one process: its own folder, its own segments, its own index log.

Write order: payload and trailer, then the index frame, then (in the caller) the table in memory.
Nothing becomes visible to another process before its bytes are readable.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.clock import Clock
from deepinfer_kvtier.io import IoEngine, Readable
from deepinfer_kvtier.sharing import Sharing

PREALLOCATE_BYTES = 16 << 20
_IOV_MAX = 1024


@dataclass(slots=True, eq=False)
class Outgoing:
    """A record on its way to disk. `views` must not change until it is written.

    namespace: `identity.namespace_tag` of the chain it belongs to.
    created_ms: time of a copy's last use, for records that are written again; None = now.
    checksum: xxh3_128 of the bytes, known before the record is handed to the writer.
    dropped:  somebody asked to forget the record while it was waiting; it must not be written.
    """

    kind: int
    shard: int
    cls: str
    cls_code: int
    digest: bytes
    parent: bytes
    depth: int
    fingerprint: bytes
    namespace: int
    views: Sequence[memoryview]
    nbytes: int
    approximate: bool
    generation: int
    checksum: bytes | None = None
    dropped: bool = False
    created_ms: int | None = None


@dataclass(slots=True)
class _OpenSegment:
    number: int
    bucket: int
    fd: int
    path: Path
    end: int
    allocated: int
    unsynced: bool = False


class SegmentWriter:
    """Appends records; not thread-safe, the directory tier serialises the calls.

    A failed write abandons its segment: the next one starts a new file, so a bad place on the
    device is not hit twice and nothing half-written is ever continued.
    """

    def __init__(
        self,
        root: Path,
        *,
        store: bytes,
        io: IoEngine,
        clock: Clock,
        segment_bytes: int,
        bucket_s: int,
        sync_bytes: int,
        sync_s: float,
        sharing: Sharing,
    ) -> None:
        self._io = io
        self._clock = clock
        self._store = store
        self.segment_bytes = segment_bytes
        self._bucket_s = bucket_s
        self._sync_bytes = sync_bytes
        self._sync_s = sync_s
        self._sharing = sharing
        self.id, self.path, self._lock_fd = sharing.claim_folder()
        self._log_path = self.path / "idx-0.kvx"
        self._log_fd = io.create(self._log_path)
        sharing.announce(self.path.name)
        self._log_end = 0
        self._log_frames = 0
        self._segments: dict[str, _OpenSegment] = {}
        self._next_segment = 0
        self._sequence = 0
        self._last_stamp_ms = 0
        self._unsynced_bytes = 0
        self._last_sync = clock.monotonic()
        self._retired: list[_OpenSegment] = []
        self.payload_bytes = 0
        self.file_bytes = 0

    def append(self, batch: Sequence[Outgoing], *, after_ms: int = 0) -> NDArray[Any]:
        """Write records and their index entries; returns the entries, in order of the batch.

        after_ms: time of the newest tombstone; the records must count as written later than it.
        raises: OSError; then none of the batch has become visible.
        """
        self._last_stamp_ms = max(self._last_stamp_ms, after_ms + 1)
        entries = np.zeros(len(batch), dtype=fmt.ENTRY)
        by_class: dict[str, list[int]] = {}
        for i, record in enumerate(batch):
            by_class.setdefault(record.cls, []).append(i)
        for cls, members in by_class.items():
            at = 0
            while at < len(members):
                at += self._append_run(cls, [batch[i] for i in members[at:]], members[at:], entries)
        if self._sharing.shared:
            # Another machine must find the bytes before it is told of them.
            self._sync_segments()
        self.log(entries)
        self._maybe_sync()
        return entries

    def log(self, entries: NDArray[Any]) -> None:
        """Append index entries as new frames.

        raises: OSError; what was written of them is torn or complete, never wrong, and the next
                call writes over it.
        """
        if not len(entries):
            return
        for frame in fmt.pack_frames(entries, self._log_frames, self._store, self.id):
            # One call a frame: a frame that was promised is behind `_log_end` and never rewritten.
            write_all(self._io, self._log_fd, [frame], self._log_end)
            self._log_end += len(frame)
            self._log_frames += 1
            self.file_bytes += len(frame)
        if self._sharing.shared:
            self._io.datasync(self._log_fd)

    def _stamp_ms(self) -> int:
        """Wall time in ms that never goes back."""
        self._last_stamp_ms = max(int(self._clock.wall() * 1000), self._last_stamp_ms)
        return self._last_stamp_ms

    def seal(self, choose: Callable[[int], bool] = lambda number: True) -> None:
        """Seal the open segments whose number `choose` accepts. raises: OSError."""
        for cls, segment in list(self._segments.items()):
            if choose(segment.number):
                self._retire(cls)

    def open_segments(self) -> set[int]:
        """Numbers of the segments that may still grow."""
        return {segment.number for segment in self._segments.values()}

    def sync(self) -> None:
        """fdatasync of segments, then of the log. raises: OSError."""
        self._sync_segments()
        self._io.datasync(self._log_fd)
        for segment in self._retired:
            self._io.close(segment.fd)
        self._retired.clear()
        self._unsynced_bytes = 0
        self._last_sync = self._clock.monotonic()

    def _sync_segments(self) -> None:
        for segment in (*self._retired, *self._segments.values()):
            if segment.unsynced:
                self._io.datasync(segment.fd)
                segment.unsynced = False

    def abandon(self) -> None:
        """Let go without another write: somebody else may be finishing the log."""
        for segment in (*self._retired, *self._segments.values()):
            self._io.close(segment.fd)
        self._io.close(self._log_fd)
        if self._lock_fd is not None:
            self._io.close(self._lock_fd)

    def close(self) -> None:
        """Seal everything and mark the log as ended; an empty folder is removed."""
        try:
            self.seal()
            end = np.zeros(1, dtype=fmt.ENTRY)
            end["flags"] = fmt.FLAG_LOG_END
            if self._log_frames:
                self.log(end)
            self.sync()
        finally:
            for segment in (*self._retired, *self._segments.values()):
                self._io.close(segment.fd)
            self._io.close(self._log_fd)
            if not self._log_frames:
                remove_folder(self._io, self.path)
            if self._lock_fd is not None:
                self._io.close(self._lock_fd)

    # -- segments

    def _append_run(
        self, cls: str, run: list[Outgoing], members: list[int], entries: NDArray[Any]
    ) -> int:
        """Write what fits one segment and one call; returns the number of records."""
        first = run[0]
        segment = self._segment_for(cls, first.cls_code, fmt.slot_bytes(first.nbytes))
        now_ms = self._stamp_ms()
        buffers: list[Readable] = []
        offset = segment.end
        taken = 0
        for record, member in zip(run, members, strict=True):
            size = fmt.slot_bytes(record.nbytes)
            crowded = len(buffers) + len(record.views) + 1 > _IOV_MAX
            if taken and (offset + size > self.segment_bytes or crowded):
                break
            trailer = self._trailer(record, now_ms).pack()
            pad = fmt.trailer_offset(record.nbytes) - record.nbytes
            buffers.extend(record.views)
            buffers.append((b"\0" * pad + trailer).ljust(size - record.nbytes, b"\0"))
            _fill_entry(entries[member : member + 1], record, segment.number, offset, now_ms)
            offset += size
            taken += 1
        try:
            self._grow(segment, offset)
            write_all(self._io, segment.fd, buffers, segment.end)
        except OSError:
            # What this file already holds stays readable; nothing more is ever written to it.
            del self._segments[cls]
            self._retired.append(segment)
            with contextlib.suppress(OSError):
                self._io.truncate(segment.fd, segment.end)
            raise
        self.payload_bytes += sum(record.nbytes for record in run[:taken])
        self.file_bytes += offset - segment.end
        self._unsynced_bytes += offset - segment.end
        segment.end = offset
        segment.unsynced = True
        return taken

    def _trailer(self, record: Outgoing, now_ms: int) -> fmt.Trailer:
        self._sequence += 1
        assert record.checksum is not None
        return fmt.Trailer(
            kind=record.kind,
            cls=record.cls_code,
            flags=fmt.FLAG_APPROXIMATE if record.approximate else 0,
            payload_bytes=record.nbytes,
            depth=record.depth,
            digest=record.digest,
            parent=record.parent,
            fingerprint=record.fingerprint,
            created_ms=now_ms if record.created_ms is None else record.created_ms,
            sequence=self._sequence,
            checksum=record.checksum,
            generation=record.generation,
            shard=record.shard,
            namespace=record.namespace,
        )

    def _segment_for(self, cls: str, cls_code: int, need: int) -> _OpenSegment:
        bucket = int(self._clock.wall()) // self._bucket_s * self._bucket_s
        segment = self._segments.get(cls)
        if segment is not None and (
            segment.bucket != bucket or segment.end + need > self.segment_bytes
        ):
            self._retire(cls)
            segment = None
        if segment is None:
            segment = self._new_segment(cls, cls_code, bucket)
            self._segments[cls] = segment
        return segment

    def _new_segment(self, cls: str, cls_code: int, bucket: int) -> _OpenSegment:
        number = self._next_segment
        self._next_segment += 1
        path = self.path / f"seg-{cls}-{bucket}-{number}.kvs"
        header = fmt.SegmentHeader(cls_code, bucket, number, self._store, self.id).pack()
        fd = self._io.create(path)
        try:
            write_all(self._io, fd, [header], 0)
            if self._sharing.shared:
                self._log_segment(cls_code, bucket, number)
        except OSError:
            self._io.close(fd)
            with contextlib.suppress(OSError):
                self._io.unlink(path)
            raise
        self.file_bytes += len(header)
        return _OpenSegment(number, bucket, fd, path, end=fmt.PAGE, allocated=fmt.PAGE)

    def _log_segment(self, cls_code: int, bucket: int, number: int) -> None:
        """Let others derive the file's name: on a mounted file system they do not list folders."""
        begin = np.zeros(1, dtype=fmt.ENTRY)
        begin["flags"], begin["segment"] = fmt.FLAG_SEGMENT, number
        begin["cls"], begin["created_s"] = cls_code, bucket
        self.log(begin)

    def _grow(self, segment: _OpenSegment, end: int) -> None:
        """Preallocate in steps: freshly extended pages cost far more than prepared ones."""
        if end <= segment.allocated or self._sharing.shared:
            # Over a network preallocation is slow or, where it is imitated, writes zeros.
            return
        step = min(PREALLOCATE_BYTES, self.segment_bytes)
        target = max(end, min(segment.allocated + step, self.segment_bytes))
        try:
            self._io.allocate(segment.fd, segment.allocated, target - segment.allocated)
        except OSError as cause:
            # A nearly full disk may still have room for the records themselves.
            if cause.errno not in (errno.ENOSPC, errno.EDQUOT) or target == end:
                raise
            target = end
            self._io.allocate(segment.fd, segment.allocated, target - segment.allocated)
        segment.allocated = target

    def _retire(self, cls: str) -> None:
        segment = self._segments.pop(cls)
        self._retired.append(segment)
        if segment.allocated > segment.end:
            self._io.truncate(segment.fd, segment.end)
        entry = np.zeros(1, dtype=fmt.ENTRY)
        entry["segment"] = segment.number
        entry["flags"] = fmt.FLAG_SEAL
        self.log(entry)

    def _maybe_sync(self) -> None:
        due = self._clock.monotonic() - self._last_sync >= self._sync_s
        if self._unsynced_bytes >= self._sync_bytes or (self._unsynced_bytes and due):
            self.sync()


def _fill_entry(
    entry: NDArray[Any], record: Outgoing, segment: int, offset: int, now_ms: int
) -> None:
    lo, hi = fmt.key_columns([record.digest])
    if record.created_ms is not None:
        now_ms = record.created_ms
    entry["key_lo"], entry["key_hi"] = lo, hi
    entry["parent"] = int.from_bytes(record.parent[:8], "little")
    entry["segment"] = segment
    entry["page"] = offset // fmt.PAGE
    entry["length"] = record.nbytes
    entry["kind"] = record.kind
    entry["cls"] = record.cls_code
    entry["flags"] = fmt.FLAG_APPROXIMATE if record.approximate else 0
    entry["created_s"] = now_ms // 1000
    entry["created_ms"] = now_ms % 1000
    entry["depth"] = record.depth
    assert record.checksum is not None
    entry["sum"] = int.from_bytes(record.checksum[-8:], "little")
    entry["shard"] = record.shard
    entry["generation"] = record.generation
    entry["namespace"] = record.namespace


def write_all(io: IoEngine, fd: int, buffers: list[Readable], offset: int) -> None:
    """pwritev until everything is written; a short write continues where it stopped."""
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while left:
        written = io.pwritev(fd, left[:_IOV_MAX], offset)
        if written <= 0:
            raise OSError(5, "the file system accepted no bytes")
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def remove_folder(io: IoEngine, path: Path) -> None:
    """Delete a writer's folder and all files in it; what is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        for name in io.listdir(path):
            io.unlink(path / name)
        io.rmdir(path)
