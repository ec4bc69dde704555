"""Directory tier: append-only segments plus index logs, shared by all processes of one machine."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from deepinfer_kvtier.base.config import KVTierConfig, permissions_of
from deepinfer_kvtier.base.errors import ClosedError
from deepinfer_kvtier.base.files import IoEngine, PosixIo, give_up
from deepinfer_kvtier.base.timing import Breaker, Clock, SteadyClock
from deepinfer_kvtier.base.values import NO_ROW, Status
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.index import LogIndex
from deepinfer_kvtier.log.liveness import Poller, open_liveness
from deepinfer_kvtier.log.log_reader import LogReader
from deepinfer_kvtier.log.reading import ALONE, SegmentReads, Urgency, Wanted
from deepinfer_kvtier.log.segments import Segment, SegmentSet
from deepinfer_kvtier.log.store_files import FORMAT_FILE, JUMP_S, save_clock, settle_clock
from deepinfer_kvtier.log.writer import SegmentWriter

logger = logging.getLogger(__name__)

SEGMENTS_AT_LEAST: Final = 16
"""Segments that a quota or a file system has room for: one eviction takes no more of it."""


LEAVE_TIME_S: Final = 60.0
"""Between two notes of the time for who opens the store next."""


class DiskTier:
    """The persistent tier of one process on one directory.

    Reads, writes and refreshes may run at the same time. No lock of the index is held
    during I/O.
    """

    name = "disk"
    validates = True

    def __init__(
        self, root: Path, *, store: bytes, config: KVTierConfig, clock: Clock, io: IoEngine
    ) -> None:
        self.root = root
        self.store = store
        self.io = io
        self.clock = clock
        self.config = config
        names = {policy.code: name for name, policy in config.classes.items()}
        self.segments = SegmentSet(root, io, names, locks=config.mode != "shared-fs")
        self.liveness = open_liveness(root, io, clock, config)
        self.counts: Counter[str] = Counter()
        self.breaker = Breaker(clock)  # of reads
        self.write_breaker = Breaker(clock)
        self.index = LogIndex(
            self.segments, linger_s=self.liveness.grace_s / 2, now_s=clock.monotonic()
        )
        self._control_lock = threading.Lock()
        self.verifiers: ThreadPoolExecutor | None = None
        if config.verify_threads:
            self.verifiers = ThreadPoolExecutor(
                config.verify_threads, thread_name_prefix="kvtier-verify"
            )
        self._reads = SegmentReads(
            io,
            self.segments,
            self.index,
            self.breaker,
            self.counts,
            pool=self.verifiers,
            helpers=config.verify_threads,
            quarantine=self.quarantine,
        )
        self._refresh_lock = threading.Lock()
        self._logs: dict[str, LogReader] = {}
        self._write_lock = threading.RLock()
        self._writer: SegmentWriter | None = None
        self._closed = False
        self._control: list[NDArray[Any]] = []
        self._no_sync_before = float("-inf")
        self.full_classes: frozenset[str] = frozenset()
        self._collected_at = clock.monotonic()
        self._collected_bytes = 0
        self.refresh()
        self.clock_jump_s = 0.0
        """By how much the machine's clock had jumped when the store was opened."""
        if isinstance(clock, SteadyClock):
            newest_s = self.index.newest_s()
            self.clock_jump_s = settle_clock(root, clock, newest_s, shared=self.liveness.shared)
            if abs(self.clock_jump_s) > JUMP_S:
                logger.warning(
                    "the clock of this machine is %.0f s away from what the store at %s has seen:"
                    " records are not aged by that",
                    self.clock_jump_s,
                    root,
                )
        self._leave_time_at_s = float("-inf")
        self.leave_time()
        self._leave_time_at_s = clock.monotonic() + LEAVE_TIME_S
        self._poller = Poller(self, config.mount) if self.liveness.shared else None

    # -- index

    def touch(self, kind: int, shard: int, digests: Sequence[bytes]) -> None:
        """Record a hit; it reaches the log when the last mark is an eighth of a lifetime old."""
        if not digests:
            return
        classes = self.config.classes.values()
        entries = self.index.touch(kind, shard, digests, int(self.clock.wall()), classes)
        if entries is not None:
            self.queue_control(entries)

    def tombstone(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """Hide everything stored for digests until now, in every process; returns how many were
        here.

        The tombstones reach the log with the next write or `write_control`.
        """
        if not digests:
            return 0
        here, entries = self.index.tombstone(kind, shard, digests, int(self.clock.wall() * 1000))
        self.queue_control(entries)
        return here

    def refresh(self, *, listing: bool = True) -> None:
        """Take in what other processes have published since the last call. raises: OSError.

        listing: look for new writers in a listing, too; on a mounted file system rarely.
        """
        with self._refresh_lock:
            mine = self._writer.path.name if self._writer else ""
            batches: list[tuple[bytes, NDArray[Any]]] = []
            names = self.liveness.names(listing=listing)
            for removed in self._logs.keys() - set(names):
                self._logs.pop(removed).close()
            unreadable = 0
            for name in names:
                if name == mine:
                    continue
                log = self._logs.get(name)
                if log is None:
                    log = self._logs[name] = LogReader(self.root / "w" / name, self.store, self.io)
                try:
                    entries = log.poll()
                except PermissionError:
                    unreadable += 1  # its records are not there for us; all others are
                    continue
                if self.liveness.shared:
                    # Opening is when a mounted file system asks for news; an open file may be old.
                    log.close()
                if len(entries):
                    batches.append((log.writer, entries))
            self.counts["unreadable_writers"] = unreadable
            self.index.pass_time(self.clock.monotonic())
            if batches:
                self.index.apply(batches)

    # -- reading

    def get_into(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        *,
        rows: NDArray[Any] | None = None,
        in_time: Callable[[], bool] = lambda: True,
        urgency: Urgency = ALONE,
    ) -> list[Status]:
        """Fill destinations with verified bytes; one status each, never an exception for storage.

        rows:    where the records were when their segments were pinned; None = look them up now.
        in_time: asked before each system call; once false, the rest comes back as TIMEOUT.
        urgency: which reads pass this one between two pieces.
        """
        if not wanted:
            return []
        if rows is None:
            rows = self.index.probe(kind, shard, [want.digest for want in wanted])
        return self._reads.get_into(kind, shard, wanted, rows, in_time, urgency)

    def quarantine(self, kind: int, shard: int, digest: bytes, segment: int) -> None:
        """A slot does not hold what the index says: nobody shall look there again.

        On a mounted file system only this process goes by it: others may see good bytes where we
        do not yet, and one machine with bad memory must not hide good records from all.
        """
        self.counts["quarantined"] += 1
        if self.liveness.shared:
            self.index.forget(kind, shard, digest, segment)
        else:
            self.tombstone(kind, shard, [digest])

    def give_up(self, kind: int, shard: int, digest: bytes, *, damaged: bool) -> None:
        """A record that was read turned out to be of no use here, whatever its checksum says.

        damaged: it is so for everybody. Else another process may know its codec, and the next put
                 of this one stores a copy that it can read, too.
        """
        (row,) = self.index.probe(kind, shard, [digest])
        if int(row["length"]) == NO_ROW:
            return
        segment = int(row["segment"])
        if damaged:
            self.quarantine(kind, shard, digest, segment)
        else:
            self.index.forget(kind, shard, digest, segment)

    # -- writing

    def put_from(self, batch: Sequence[EncodedRecord]) -> list[Status]:
        """Write records and publish them to every process.

        returns: for each OK, or SKIPPED for one that was dropped, or whose bytes are not what was
                 handed over. raises: OSError; then nothing of the batch is visible.
        """
        with self._write_lock:
            writer = self._open_writer()
            self._flush_control(writer)
            wanted = [record for record in batch if not record.dropped]
            entries = writer.append(wanted, after_ms=self._after_ms(wanted))
            self.index.apply([(writer.id, entries)])
        return [
            Status.SKIPPED if record.dropped or record.changed else Status.OK for record in batch
        ]

    def _after_ms(self, batch: Sequence[EncodedRecord]) -> int:
        names = ((out.kind, out.shard, out.digest) for out in batch)
        return self.index.newest_tomb_ms(names, int(self.clock.wall() * 1000))

    def replace(self, batch: Sequence[EncodedRecord]) -> None:
        """Write records whose older copies must go. raises: OSError.

        The tombstones reach the log after the new copies, so that a crash leaves one of the two.
        """
        with self._write_lock:
            writer = self._open_writer()
            self._flush_control(writer)
            now_ms = int(self.clock.wall() * 1000)
            for record in batch:
                _, entries = self.index.tombstone(
                    record.kind, record.shard, [record.digest], now_ms
                )
                self.queue_control(entries)
            entries = writer.append(batch, after_ms=self._after_ms(batch))
            self._flush_control(writer)
            self.index.apply([(writer.id, entries)])

    @property
    def collection_due(self) -> bool:
        """Whether so much was written since the last collection that a quota may be passed."""
        writer = self._writer
        if writer is None or not (self.config.quota_bytes or self.config.class_quotas):
            return False
        return writer.file_bytes - self._collected_bytes >= writer.segment_bytes

    def leave_time(self) -> None:
        """Note the time for who opens the store next; failing only costs precision then."""
        if self.config.read_only or self.liveness.shared or not isinstance(self.clock, SteadyClock):
            return
        now_s = self.clock.monotonic()
        if not len(self.index) or now_s < self._leave_time_at_s:
            return
        self._leave_time_at_s = now_s + LEAVE_TIME_S
        with contextlib.suppress(OSError):
            save_clock(self.root, self.clock, permissions_of(self.config))

    def since_collected_s(self) -> float:
        """Seconds since the last collection, at least the usual interval."""
        passed = self.clock.monotonic() - self._collected_at
        return max(passed, self.config.gc_interval_s)

    def mark_collected(self) -> None:
        """A collection has looked at everything written so far."""
        self.leave_time()
        self._collected_at = self.clock.monotonic()
        self._collected_bytes = self._writer.file_bytes if self._writer else 0

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """`tombstone` for records that may be on their way to disk in this process.

        A write that runs now is older than the tombstone; a later one sees `EncodedRecord.dropped`.
        """
        with self._write_lock:
            return self.tombstone(kind, shard, digests)

    def write_control(self) -> None:
        """Write waiting tombstones and recency marks. raises: OSError."""
        with self._write_lock:
            if self._control:
                self._flush_control(self._open_writer())

    def append_control(self, entries: NDArray[Any]) -> None:
        """Write control entries now. raises: OSError."""
        with self._write_lock:
            self._open_writer().log(entries)

    def seal(self, numbers: set[int] | None = None) -> None:
        """Close growing segments of this process: those with these numbers, by default all."""
        with self._write_lock:
            writer = self._own_writer()
            if writer is not None:
                growing = writer.open_segments()
                writer.seal(lambda number: numbers is None or number in numbers)
                for number in growing - writer.open_segments():
                    self.segments.need(writer.id, number).sealed = True

    def sync(self) -> None:
        """Make everything written so far survive power loss. raises: OSError."""
        with self._write_lock:
            writer = self._own_writer()
            if writer is not None:
                self._no_sync_before = self.clock.monotonic() + self.config.sync_s  # if it fails
                writer.sync()
                self._no_sync_before = float("-inf")

    def sync_in_s(self) -> float:
        """Seconds until `sync` is due for the sake of what nobody asked to be synced."""
        writer = self._writer
        if writer is None:
            return float("inf")
        return max(writer.sync_in_s(), self._no_sync_before - self.clock.monotonic())

    def is_there(self) -> bool:
        """Whether the store still has its folder; if not, what this process writes is lost."""
        if (self.root / FORMAT_FILE).exists():
            self.counts["folder_gone"] = 0
            return True
        with self._write_lock:
            if self._writer is not None and not self._closed:
                self._writer.abandon()
                self._writer = None
        self.counts["folder_gone"] = 1
        return False

    @property
    def delete_grace_s(self) -> float:
        """Seconds between the tombstone of a segment and the end of its file."""
        return max(self.config.delete_grace_s, self.liveness.grace_s)

    def is_growing(self, segment: Segment) -> bool:
        """Whether this process still appends to a segment."""
        with self._write_lock:
            writer = self._writer
            return (
                writer is not None
                and writer.id == segment.writer
                and segment.number in writer.open_segments()
            )

    @property
    def own_log_frames(self) -> int:
        """Frames in the log of this process's writer."""
        return self._writer.log_frames if self._writer else 0

    @property
    def writer_name(self) -> str:
        """Folder name of this process's writer; empty before the first write."""
        return self._writer.path.name if self._writer else ""

    def logs(self) -> dict[str, LogReader]:
        """Known logs of other writers, by folder name."""
        with self._refresh_lock:
            return dict(self._logs)

    def forget_log(self, name: str) -> None:
        """Stop following a writer whose folder is removed."""
        with self._refresh_lock:
            log = self._logs.pop(name, None)
            if log is not None:
                log.close()

    def usage(self) -> dict[str, int]:
        """Entries, index memory and counters."""
        used: dict[str, int] = {
            "entries": len(self.index),
            "duplicate_entries": self.index.duplicates,
            "index_bytes": self.index.nbytes,
            "segments": len(self.segments.all()),
            "breaker_open": int(self.breaker.is_open),
            "write_breaker_open": int(self.write_breaker.is_open),
            "clock_jump_s": int(self.clock_jump_s),
            "clock_off_s": int(self.clock.off_s()) if isinstance(self.clock, SteadyClock) else 0,
            **self.counts,
        }
        writer = self._writer
        used["written_payload_bytes"] = writer.payload_bytes if writer else 0
        used["written_file_bytes"] = writer.file_bytes if writer else 0
        logs = self.logs().values()
        used["bad_index_frames"] = sum(log.bad_frames for log in logs)
        used["bad_snapshots"] = sum(log.bad_snapshots for log in logs)
        used["index_rescans"] = sum(log.rescans for log in logs)
        return used

    def close(self) -> None:
        """Seal, mark the own log as ended and close every descriptor. raises: OSError."""
        if self._poller is not None:
            self._poller.close()
        self._leave_time_at_s = float("-inf")
        self.leave_time()
        try:
            with self._write_lock:
                if self._control:
                    self._flush_control(self._open_writer())
                writer = self._own_writer()
                # Other threads must not write to numbers that may be others' files by then.
                self._closed = True
                if writer is not None:
                    writer.close()
        finally:
            self._closed = True
            if self.verifiers is not None:
                self.verifiers.shutdown()
            for log in self.logs().values():
                log.close()
            self.segments.close()

    def leave_to_parent(self) -> None:
        """In a forked child: give up the descriptors, whose locks would outlast the parent."""
        if not self._closed and isinstance(self.io, PosixIo):  # else the numbers may mean anything
            give_up(self.segments.descriptors())
            give_up([] if self._writer is None else self._writer.descriptors())
        self._closed = True

    def _own_writer(self) -> SegmentWriter | None:
        """The writer, unless this process was away so long that others may have adopted it."""
        writer = None if self._closed else self._writer
        if writer is not None and self.liveness.is_fenced():
            self.counts["abandoned_writers"] += 1
            writer.abandon()
            self._writer = writer = None
        return writer

    def _open_writer(self) -> SegmentWriter:
        if self._closed:
            raise ClosedError("the cache is closed; open it again")
        writer = self._own_writer()
        if writer is None:
            segment_bytes = self.config.segment_bytes
            for space in self._spaces():
                # Deletion works by whole segments: it needs several of them to have a choice.
                segment_bytes = min(segment_bytes, max(space // SEGMENTS_AT_LEAST, 2 * fmt.PAGE))
            self._writer = writer = SegmentWriter(
                self.root,
                store=self.store,
                io=self.io,
                clock=self.clock,
                segment_bytes=segment_bytes,
                bucket_s=self.config.bucket_s,
                sync_bytes=self.config.sync_bytes,
                sync_s=self.config.sync_s,
                liveness=self.liveness,
                files=self.config.mount.segment_files if self.liveness.shared else 1,
            )
        return writer

    def _spaces(self) -> list[int]:
        """Bytes that segments have to share: quotas, and the file system."""
        spaces = list(self.config.class_quotas.values())
        if self.config.quota_bytes is not None:
            spaces.append(self.config.quota_bytes)
        with contextlib.suppress(OSError):
            spaces.append(self.io.space(self.root)[1])
        return spaces

    def _flush_control(self, writer: SegmentWriter) -> None:
        with self._control_lock:
            waiting, self._control = self._control, []
        for i, entries in enumerate(waiting):
            try:
                writer.log(entries)
            except OSError:
                with self._control_lock:
                    self._control[:0] = waiting[i:]
                raise

    def queue_control(self, entries: NDArray[Any]) -> None:
        """Control entries for the log, with the next write or `write_control`."""
        if not self.config.read_only:
            with self._control_lock:
                self._control.append(entries)
