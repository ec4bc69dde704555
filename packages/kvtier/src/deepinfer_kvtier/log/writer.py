"""When a writer takes snapshots of its own log, and what it gives back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.files import IOV_MAX, IoEngine, Readable, is_full, is_plain, write_all
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord, entries_of, note_changes, trailers_of
from deepinfer_kvtier.log.liveness import Liveness
from deepinfer_kvtier.log.log_reader import (
    LogReader,
    Snapshot,
    compact,
    numbers_of,
    snapshot_name,
    write_snapshot,
)
from deepinfer_kvtier.log.segments import parse_segment_name


class Snapshotter:
    """Snapshots of one writer's log; used by whoever may append to it."""

    def __init__(self, folder: Path, store: bytes, writer: bytes, io: IoEngine) -> None:
        self._folder = folder
        self._store = store
        self._writer = writer
        self._io = io
        self._number: int | None = None
        self._frames = 0
        self._entries = 0

    def due(self, frames: int, least: int) -> bool:
        """Whether the log has grown by `least` frames and by as much as the last snapshot holds:
        then all snapshots together cost no more than a fixed share of the log."""
        return frames - self._frames >= max(least, self._entries // fmt.ENTRIES_PER_FRAME)

    def take(self, log_fd: int) -> int:
        """Write one and give back the log before the one before it; returns its bytes.

        Failing is harmless: the last snapshots are as good as before, and 0 is returned.
        """
        try:
            return self._take(log_fd)
        except OSError:
            return 0

    def _take(self, log_fd: int) -> int:
        log = LogReader(self._folder, self._store, self._io)
        try:
            entries = log.poll()
        finally:
            log.close()
        names = self._io.listdir(self._folder)
        files = (parse_segment_name(name) for name in names)
        alive = {file[2] for file in files if file is not None}
        taken = numbers_of(names)
        number = taken[0] + 1 if taken else 0
        snapshot = Snapshot(number, log.frames, compact(entries, alive))
        nbytes = write_snapshot(self._folder, snapshot, self._store, self._writer, self._io)
        former = self._number
        for other in taken:
            if other != former:
                self._io.unlink(self._folder / snapshot_name(other))
        if former is not None:
            self._io.punch(log_fd, 0, self._frames * fmt.PAGE)
        self._number = number
        self._frames, self._entries = log.frames, len(snapshot.entries)
        return nbytes


PREALLOCATE_BYTES = 16 << 20
_SNAPSHOT_FRAMES = 1024
_LAST_SNAPSHOT_FRAMES = 256  # of shorter logs readers take the frames at once


_FEWEST_A_FILE = 8  # records; fewer are not worth being spread over files


@dataclass(slots=True)
class _OpenSegment:
    number: int
    bucket: int
    fd: int
    path: Path
    end: int
    allocated: int
    unsynced: bool = False


@dataclass(slots=True)
class _Run:
    """Records that one call appends to one segment."""

    key: tuple[str, int]
    segment: _OpenSegment
    members: list[int]
    records: list[EncodedRecord]
    trailers: bytes
    payload_bytes: int
    end: int


class SegmentWriter:
    """Appends records; not thread-safe, the directory tier serialises the calls.

    A failed write abandons its segment: the next one starts a new file, so a bad place on the
    device is not hit twice and nothing half-written is ever continued.

    files: segments of each class that grow at a time; they are written and flushed side by side.
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
        liveness: Liveness,
        files: int = 1,
    ) -> None:
        self._files = files
        self._next_file = 0
        self._helpers = (
            ThreadPoolExecutor(files, thread_name_prefix="kvtier-files") if files > 1 else None
        )
        self._io = io
        self._clock = clock
        self._store = store
        self.segment_bytes = segment_bytes
        self._bucket_s = bucket_s
        self._sync_bytes = sync_bytes
        self._sync_s = sync_s
        self._liveness = liveness
        self.id, self.path, self._lock_fd = liveness.claim_folder()
        self._log_path = self.path / "idx-0.kvx"
        self._log_fd = io.create(self._log_path)
        liveness.announce(self.path.name)
        self._log_end = 0
        self.log_frames = 0
        self._snapshots = Snapshotter(self.path, store, self.id, io)
        self._segments: dict[tuple[str, int], _OpenSegment] = {}
        self._next_segment = 0
        self._sequence = 0
        self._last_stamp_ms = 0
        self._unsynced_bytes = 0
        self._unsynced_since = 0.0
        self._retired: list[_OpenSegment] = []
        self.payload_bytes = 0
        self.file_bytes = 0

    def append(self, batch: Sequence[EncodedRecord], *, after_ms: int = 0) -> NDArray[Any]:
        """Write records and their index entries; returns the entries, in order of the batch.

        A record whose bytes are not what was handed over gets no entry: nobody finds it. What of
        it is written has the checksum of what was meant, should a reader find it all the same.
        after_ms: time of the newest tombstone; the records must count as written later than it.
        raises: OSError; then none of the batch has become visible.
        """
        self._last_stamp_ms = max(self._last_stamp_ms, after_ms + 1)
        now_ms = self._stamp_ms()
        entries = entries_of(batch, now_ms)
        trailers = memoryview(trailers_of(batch, now_ms, self._sequence))
        self._sequence += len(batch)
        by_class: dict[str, list[int]] = {}
        for i, record in enumerate(batch):
            by_class.setdefault(record.cls, []).append(i)
        for members in by_class.values():
            parts = self._spread(members)
            while parts:
                runs = [self._plan_run(batch, part, n, trailers, entries) for n, part in parts]
                self._write_runs(runs)
                parts = [
                    (run.key[1], part[len(run.members) :])
                    for run, (_, part) in zip(runs, parts, strict=True)
                    if len(run.members) < len(part)
                ]
        if self._liveness.shared:
            # Another machine must find the bytes before it is told of them.
            self._sync_segments()
        note_changes(batch)
        good = [not record.changed for record in batch]
        if not all(good):
            entries = entries[np.array(good, dtype=np.bool_)]
        self.log(entries)
        return entries

    def log(self, entries: NDArray[Any]) -> None:
        """Append index entries as new frames.

        raises: OSError; what was written of them is torn or complete, never wrong, and the next
                call writes over it.
        """
        if not len(entries):
            return
        for frame in fmt.pack_frames(entries, self.log_frames, self._store, self.id):
            # One call a frame: a frame that was promised is behind `_log_end` and never rewritten.
            write_all(self._io, self._log_fd, [frame], self._log_end)
            self._log_end += len(frame)
            self.log_frames += 1
            self.file_bytes += len(frame)
        if self._liveness.shared:
            self._io.datasync(self._log_fd)

    def _stamp_ms(self) -> int:
        """Wall time in ms that never goes back."""
        self._last_stamp_ms = max(int(self._clock.wall() * 1000), self._last_stamp_ms)
        return self._last_stamp_ms

    def seal(self, choose: Callable[[int], bool] = lambda number: True) -> None:
        """Seal the open segments whose number `choose` accepts. raises: OSError."""
        for key, segment in list(self._segments.items()):
            if choose(segment.number):
                self._retire(key)

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
        self._take_snapshot(_SNAPSHOT_FRAMES)

    def sync_in_s(self) -> float:
        """Seconds until what was written has waited long enough, or is enough, to be synced."""
        if not self._unsynced_bytes:
            return float("inf")
        if self._unsynced_bytes >= self._sync_bytes:
            return 0.0
        return self._unsynced_since + self._sync_s - self._clock.monotonic()

    def _take_snapshot(self, least_frames: int) -> None:
        """Shorten the way of those who open the directory later, once the log has grown enough."""
        if self._snapshots.due(self.log_frames, least_frames):
            self.file_bytes += self._snapshots.take(self._log_fd)

    def _sync_segments(self) -> None:
        for segment in (*self._retired, *self._segments.values()):
            if segment.unsynced:
                self._io.datasync(segment.fd)
                segment.unsynced = False

    def descriptors(self) -> list[int]:
        """All that are open."""
        fds = [segment.fd for segment in (*self._retired, *self._segments.values())]
        return [*fds, self._log_fd] + ([] if self._lock_fd is None else [self._lock_fd])

    def abandon(self) -> None:
        """Let go without another write: another process may be finishing the log."""
        self._end_helpers()
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
            if self.log_frames:
                self.log(end)
            self.sync()
            self._take_snapshot(_LAST_SNAPSHOT_FRAMES)
        finally:
            for segment in (*self._retired, *self._segments.values()):
                self._io.close(segment.fd)
            self._io.close(self._log_fd)
            if not self.log_frames:
                remove_folder(self._io, self.path)
            if self._lock_fd is not None:
                self._io.close(self._lock_fd)
            self._end_helpers()

    def _end_helpers(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)

    # -- segments

    def _spread(self, members: list[int]) -> list[tuple[int, list[int]]]:
        """Records of one class by the file they go to, neighbours together."""
        count = max(1, min(self._files, len(members) // _FEWEST_A_FILE))
        first, self._next_file = self._next_file, (self._next_file + count) % self._files
        size = -(-len(members) // count)
        starts = range(0, len(members), size)
        return [
            ((first + i) % self._files, members[start : start + size])
            for i, start in enumerate(starts)
        ]

    def _plan_run(
        self,
        batch: Sequence[EncodedRecord],
        members: list[int],
        file: int,
        trailers: memoryview,
        entries: NDArray[Any],
    ) -> _Run:
        """The first of these records, as many as fit one segment and one call."""
        first = batch[members[0]]
        key = first.cls, file
        segment = self._segment_for(key, first.origin.cls_code, fmt.slot_bytes(first.nbytes))
        offsets: list[int] = []
        offset, vectors = segment.end, 0
        for member in members:
            record = batch[member]
            size = fmt.slot_bytes(record.nbytes)
            vectors += len(record.views) + 1
            if offsets and (offset + size > self.segment_bytes or vectors > IOV_MAX):
                break
            offsets.append(offset)
            offset += size
        some = members[: len(offsets)]
        entries["segment"][some] = segment.number
        entries["page"][some] = [at // fmt.PAGE for at in offsets]
        records = [batch[member] for member in some]
        starts = [member * fmt.TRAILER_BYTES for member in some]
        own = b"".join([trailers[at : at + fmt.TRAILER_BYTES] for at in starts])
        payload_bytes = sum([record.nbytes for record in records])
        return _Run(key, segment, some, records, own, payload_bytes, offset)

    def _write_runs(self, runs: list[_Run]) -> None:
        """Append runs to their segments, each a different one. raises: OSError of the first."""
        if self._helpers is None or len(runs) == 1:
            errors = [self._write_run(run) for run in runs]
        else:
            futures = [self._helpers.submit(self._write_run, run, flush=True) for run in runs]
            errors = [future.result() for future in futures]
        for run, error in zip(runs, errors, strict=True):
            if error is None:
                grown = run.end - run.segment.end
                if not self._unsynced_bytes:
                    self._unsynced_since = self._clock.monotonic()
                self.payload_bytes += run.payload_bytes
                self.file_bytes += grown
                self._unsynced_bytes += grown
                run.segment.end = run.end
            else:
                # What this file already holds stays readable; nothing more is ever written to it.
                self._retired.append(self._segments.pop(run.key))
                with contextlib.suppress(OSError):
                    self._io.truncate(run.segment.fd, run.segment.end)
                    if run.segment.end == fmt.PAGE:
                        self._io.unlink(run.segment.path)  # else each attempt would leave a file
        for error in errors:
            if error is not None:
                raise error

    def _write_run(self, run: _Run, *, flush: bool = False) -> OSError | None:
        """Changes nothing but the file of the segment, so that several can go on at a time."""
        segment = run.segment
        segment.unsynced = True
        try:
            self._grow(segment, run.end)
            if native.routines is not None and is_plain(self._io):
                lists = [record.views for record in run.records]
                native.routines.write_records(segment.fd, segment.end, lists, run.trailers)
            else:
                write_all(self._io, segment.fd, _slots(run), segment.end)
            if flush:
                self._io.datasync(segment.fd)
                segment.unsynced = False
        except OSError as error:
            return error
        return None

    def _segment_for(self, key: tuple[str, int], cls_code: int, need: int) -> _OpenSegment:
        bucket = int(self._clock.wall()) // self._bucket_s * self._bucket_s
        segment = self._segments.get(key)
        if segment is not None and (
            segment.bucket != bucket or segment.end + need > self.segment_bytes
        ):
            self._retire(key)
            segment = None
        if segment is None:
            segment = self._new_segment(key[0], cls_code, bucket)
            self._segments[key] = segment
        return segment

    def _new_segment(self, cls: str, cls_code: int, bucket: int) -> _OpenSegment:
        number = self._next_segment
        self._next_segment += 1
        path = self.path / f"seg-{cls}-{bucket}-{number}.kvs"
        header = fmt.SegmentHeader(cls_code, bucket, number, self._store, self.id).pack()
        fd = self._io.create(path)
        try:
            write_all(self._io, fd, [header], 0)
            if self._liveness.shared:
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
        if end <= segment.allocated or self._liveness.shared:
            # Over a network preallocation is slow or, where it is imitated, writes zeros.
            return
        step = min(PREALLOCATE_BYTES, self.segment_bytes)
        target = max(end, min(segment.allocated + step, self.segment_bytes))
        try:
            self._io.allocate(segment.fd, segment.allocated, target - segment.allocated)
        except OSError as cause:
            # A nearly full disk may still have room for the records themselves.
            if not is_full(cause) or target == end:
                raise
            target = end
            self._io.allocate(segment.fd, segment.allocated, target - segment.allocated)
        segment.allocated = target

    def _retire(self, key: tuple[str, int]) -> None:
        segment = self._segments.pop(key)
        self._retired.append(segment)
        if segment.allocated > segment.end:
            self._io.truncate(segment.fd, segment.end)
        entry = np.zeros(1, dtype=fmt.ENTRY)
        entry["segment"] = segment.number
        entry["flags"] = fmt.FLAG_SEAL
        self.log(entry)


def _slots(run: _Run) -> list[Readable]:
    """The bytes of a run in writing order. The pure form of `native.routines.write_records`."""
    buffers: list[Readable] = []
    for i, record in enumerate(run.records):
        tail = bytearray(fmt.slot_bytes(record.nbytes) - record.nbytes)
        pad, at = fmt.trailer_offset(record.nbytes) - record.nbytes, i * fmt.TRAILER_BYTES
        tail[pad : pad + fmt.TRAILER_BYTES] = run.trailers[at : at + fmt.TRAILER_BYTES]
        buffers += [*record.views, tail]
    return buffers


def remove_folder(io: IoEngine, path: Path) -> None:
    """Delete a writer's folder and all files in it; what is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        for name in io.listdir(path):
            io.unlink(path / name)
        with contextlib.suppress(OSError):  # a neighbour put something there: the next one's turn
            io.rmdir(path)
