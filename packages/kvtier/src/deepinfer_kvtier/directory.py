"""Directory tier: append-only segments plus index logs, shared by all processes of one machine."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.breaker import Breaker
from deepinfer_kvtier.clock import Clock
from deepinfer_kvtier.config import KVTierConfig
from deepinfer_kvtier.io import IoEngine
from deepinfer_kvtier.logs import LogReader
from deepinfer_kvtier.reading import Wanted, plan_runs, read_run
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.segments import Segment, SegmentSet
from deepinfer_kvtier.table import APPROXIMATE_BIT, ROW, EntryTable
from deepinfer_kvtier.writer import Outgoing, SegmentWriter

NO_ROW = 0xFFFFFFFF
_GONE_ERRORS = (errno.ENOENT, errno.ESTALE)


class DirectoryTier:
    """The persistent tier of one process on one directory.

    Reads, writes and refreshes may run at the same time. The table lock is never held during I/O.
    """

    def __init__(
        self, root: Path, *, store: bytes, config: KVTierConfig, clock: Clock, io: IoEngine
    ) -> None:
        self.root = root
        self.store = store
        self.io = io
        self.clock = clock
        self.config = config
        self.segments = SegmentSet(root, io)
        self.counts: Counter[str] = Counter()
        self.breaker = Breaker(clock)
        self._lock = threading.RLock()
        self._table = EntryTable()
        # Further copies of records in the table, written by other processes at the same time.
        self._spares: NDArray[Any] = np.zeros(0, dtype=ROW)
        self._tombs: dict[tuple[int, int, int, int], int] = {}
        self._last_tomb_ms = 0
        self._fresh_tombs: set[tuple[int, bytes]] = set()
        self._removed: list[tuple[bytes, int, int]] = []
        self._refresh_lock = threading.Lock()
        self._logs: dict[str, LogReader] = {}
        self._write_lock = threading.RLock()
        self._writer: SegmentWriter | None = None
        self._control: list[NDArray[Any]] = []
        self.refresh()

    # -- index

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """Rows for digests, in order; `length` is 0xFFFFFFFF where there is none."""
        lo, hi = fmt.key_columns(list(digests))
        with self._lock:
            numbers = self._table.find(lo, hi, kind, shard)
            rows = self._table.take(np.maximum(numbers, 0))
        rows["length"][numbers < 0] = NO_ROW
        return rows

    def touch(self, kind: int, shard: int, digests: Sequence[bytes]) -> None:
        """Record a hit; it reaches the log when the last mark is an eighth of a lifetime old."""
        if not digests:
            return
        now = int(self.clock.wall())
        lo, hi = fmt.key_columns(list(digests))
        with self._lock:
            numbers = self._table.find(lo, hi, kind, shard)
            there = numbers >= 0
            rows = self._table.take(numbers[there])
            stale = np.zeros(len(rows), dtype=np.bool_)
            for policy in self.config.classes.values():
                if policy.ttl_s is not None:
                    aged = now - rows["seen_s"].astype(np.int64) >= policy.ttl_s / 8
                    stale |= (rows["cls"] == policy.code) & aged
            if not stale.any():
                return
            self._table.touch(numbers[there][stale], now)
            entries = np.zeros(int(stale.sum()), dtype=fmt.ENTRY)
            entries["key_lo"], entries["key_hi"] = lo[there][stale], hi[there][stale]
            entries["kind"], entries["shard"] = kind, shard
            entries["flags"] = fmt.FLAG_TOUCH
            entries["created_s"] = now
            if not self.config.read_only:
                self._control.append(entries)

    def refresh(self) -> None:
        """Take in what other processes have published since the last call. raises: OSError."""
        with self._refresh_lock:
            mine = self._writer.path.name if self._writer else ""
            batches: list[tuple[bytes, NDArray[Any]]] = []
            names = self.io.listdir(self.root / "w")
            for removed in self._logs.keys() - set(names):
                self._logs.pop(removed).close()
            for name in names:
                if len(name) != 32 or name == mine:
                    continue
                log = self._logs.get(name)
                if log is None:
                    log = self._logs[name] = LogReader(self.root / "w" / name, self.store, self.io)
                entries = log.poll()
                if len(entries):
                    batches.append((log.writer, entries))
            if batches:
                self._apply(batches)

    def _apply(self, batches: list[tuple[bytes, NDArray[Any]]]) -> None:
        """Tombstones of all logs first: the order between logs is only known by their times."""
        for _, entries in batches:
            control = entries[(entries["flags"] & fmt.CONTROL_FLAGS) != 0]
            for entry in control[(control["flags"] & fmt.FLAG_TOMB_KEY) != 0]:
                self._bury_key(entry)
            for entry in control[(control["flags"] & fmt.FLAG_TOMB_SEGMENT) != 0]:
                segment = self.segments.need(fmt.key_bytes(entry), int(entry["segment"]))
                segment.buried = True
                self.forget_segment(segment)
        for writer, entries in batches:
            is_control = (entries["flags"] & fmt.CONTROL_FLAGS) != 0
            self._insert(writer, entries[~is_control])
            for entry in entries[(entries["flags"] & fmt.FLAG_SEAL) != 0]:
                self.segments.need(writer, int(entry["segment"])).sealed = True
        for _, entries in batches:
            touches = entries[(entries["flags"] & fmt.FLAG_TOUCH) != 0]
            with self._lock:
                for kind, shard in {(int(t["kind"]), int(t["shard"])) for t in touches}:
                    some = touches[(touches["kind"] == kind) & (touches["shard"] == shard)]
                    found = self._table.find(some["key_lo"], some["key_hi"], kind, shard)
                    there = found >= 0
                    self._table.touch(found[there], some["created_s"][there])

    def _bury_key(self, entry: Any) -> None:
        key = _tomb_key(entry)
        stamp = int(entry["created_s"]) * 1000 + int(entry["created_ms"])
        with self._lock:
            if self._tombs.get(key, -1) >= stamp:
                return
            self._tombs[key] = stamp
            self._fresh_tombs.add((key[2], fmt.key_bytes(entry)))
            lo, hi = np.array([key[0]], dtype="<u8"), np.array([key[1]], dtype="<u8")
            kind, shard = key[2:]
            number = self._table.find(lo, hi, kind, shard)
            if number[0] >= 0:
                self._note_removed(self._table.remove(number))
            copies = (self._spares["key_lo"] == lo[0]) & (self._spares["key_hi"] == hi[0])
            copies &= (self._spares["kind"] == kind) & (self._spares["shard"] == shard)
            self._spares = self._spares[~copies]

    def _insert(self, writer: bytes, entries: NDArray[Any]) -> None:
        if not len(entries):
            return
        numbers, inverse = np.unique(entries["segment"], return_inverse=True)
        owners = [self.segments.need(writer, int(number)) for number in numbers]
        local = np.array([owner.local for owner in owners], dtype=np.uint32)
        alive = np.array([not owner.gone for owner in owners], dtype=np.bool_)
        rows = np.zeros(len(entries), dtype=ROW)
        for name in ("key_lo", "key_hi", "page", "length", "kind", "shard", "cls", "depth"):
            rows[name] = entries[name]
        rows["segment"] = local[inverse]
        rows["seen_s"] = entries["created_s"]
        rows["flags"] = np.minimum(entries["generation"], 127)
        approximate = (entries["flags"] & fmt.FLAG_APPROXIMATE) != 0
        rows["flags"][approximate] |= APPROXIMATE_BIT
        keep = alive[inverse] & ~self._buried(entries)
        with self._lock:
            fresh = rows[keep]
            added = self._table.insert(fresh)
            if not added.all():
                self._spares = np.concatenate((self._spares, fresh[~added]))

    def _buried(self, entries: NDArray[Any]) -> NDArray[np.bool_]:
        """Entries written before a tombstone for their key."""
        result = np.zeros(len(entries), dtype=np.bool_)
        if not self._tombs:
            return result
        lows = np.array([key[0] for key in self._tombs], dtype="<u8")
        for i in np.flatnonzero(np.isin(entries["key_lo"], lows)):
            entry = entries[i]
            stamp = int(entry["created_s"]) * 1000 + int(entry["created_ms"])
            result[i] = stamp <= self._tombs.get(_tomb_key(entry), -1)
        return result

    def forget_segment(self, segment: Segment) -> NDArray[Any]:
        """The file is gone: take its rows out and return them."""
        with self._lock:
            numbers = self._table.numbers_in_segment(segment.local)
            rows = self._table.remove(numbers)
            self._spares = self._spares[self._spares["segment"] != segment.local]
            self._note_removed(self._without_replaced(rows))
        self.segments.mark_gone(segment)
        return rows

    def _without_replaced(self, removed: NDArray[Any]) -> NDArray[Any]:
        """Put further copies of removed rows in their place; returns the rows that had none."""
        if not len(self._spares) or not len(removed):
            return removed
        self._spares = self._spares[~self._table.insert(self._spares)]
        lost = [
            self._table.find(
                row["key_lo"], row["key_hi"], int(row["kind"][0]), int(row["shard"][0])
            )
            < 0
            for row in removed.reshape(-1, 1)
        ]
        return removed[np.concatenate(lost)]

    def rows(self) -> NDArray[Any]:
        """A copy of the row of every record, for listings."""
        with self._lock:
            return self._table.rows()

    def stored_rows(self) -> NDArray[Any]:
        """A copy of the rows of everything stored, further copies of a record included."""
        with self._lock:
            return np.concatenate((self._table.rows(), self._spares))

    def drain_removed(self) -> list[tuple[bytes, int, int]]:
        """(key, kind, depth) of records that left since the last call, for events."""
        if not self._removed:
            return []
        with self._lock:
            gone, self._removed = self._removed, []
            return gone

    def drain_tombs(self) -> set[tuple[int, bytes]]:
        """(kind, 16-byte key) of what was buried since the last call, here or elsewhere."""
        if not self._fresh_tombs:
            return set()
        with self._lock:
            fresh, self._fresh_tombs = self._fresh_tombs, set()
            return fresh

    def _note_removed(self, rows: NDArray[Any]) -> None:
        for row in rows:
            key = int(row["key_lo"]).to_bytes(8, "little") + int(row["key_hi"]).to_bytes(
                8, "little"
            )
            self._removed.append((key, int(row["kind"]), int(row["depth"])))

    # -- reading

    def get_into(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        *,
        rows: NDArray[Any] | None = None,
        in_time: Callable[[], bool] = lambda: True,
    ) -> list[Status]:
        """Fill destinations with verified bytes; one status each, never an exception for storage.

        rows:    where the records were when their segments were pinned; None = look them up now.
        in_time: asked before each system call; once false, the rest comes back as TIMEOUT.
        """
        statuses = [Status.MISS] * len(wanted)
        if not wanted:
            return statuses
        if rows is None:
            rows = self.probe(kind, shard, [want.digest for want in wanted])
        for run in plan_runs(rows, wanted):
            if not in_time():
                for i in run.members:
                    statuses[i] = Status.TIMEOUT
                continue
            outcome = self._read_one_run(kind, shard, run, wanted, rows)
            for i, status in zip(run.members, outcome, strict=True):
                statuses[i] = status
        return statuses

    def _read_one_run(
        self, kind: int, shard: int, run: Any, wanted: Sequence[Wanted], rows: NDArray[Any]
    ) -> list[Status]:
        members = [wanted[i] for i in run.members]
        if self.breaker.is_open:
            self.counts["breaker_skips"] += 1
            return [Status.ERROR] * len(members)
        segment = self.segments.get(run.segment)
        try:
            fd = self.segments.acquire(run.segment)
            if fd is None:
                self.forget_segment(segment)
                return [Status.MISS] * len(members)
            try:
                outcome = read_run(self.io, fd, run.page * fmt.PAGE, kind, shard, members)
            finally:
                self.segments.release(run.segment)
        except OSError as error:
            if error.errno in _GONE_ERRORS:
                self.forget_segment(segment)
                return [Status.MISS] * len(members)
            self.counts["read_errors"] += 1
            self.breaker.error()
            return [Status.ERROR] * len(members)
        self.breaker.success()
        self.counts.update(outcome.counts)
        for want, status in zip(members, outcome.statuses, strict=True):
            if status is Status.CORRUPT:
                self.bury(kind, shard, [want.digest])
            elif status is Status.MISS:
                self._forget(kind, shard, want.digest, run.segment)
        return outcome.statuses

    def _forget(self, kind: int, shard: int, digest: bytes, segment: int) -> None:
        """The place the index names does not hold the record: do not look there again."""
        lo, hi = fmt.key_columns([digest])
        with self._lock:
            number = self._table.find(lo, hi, kind, shard)
            if number[0] >= 0 and int(self._table.take(number)["segment"][0]) == segment:
                self._note_removed(self._without_replaced(self._table.remove(number)))

    # -- writing

    def put_from(self, batch: Sequence[Outgoing]) -> None:
        """Write records and publish them to every process.

        raises: OSError; then nothing of the batch is visible.
        """
        with self._write_lock:
            writer = self._open_writer()
            self._flush_control(writer)
            wanted = [record for record in batch if not record.dropped]
            entries = writer.append(wanted, after_ms=self._last_tomb_ms)
            self._apply([(writer.id, entries)])

    def drop(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """`bury` for records that may be on their way to disk in this process.

        A write that runs now is older than the tombstone; a later one sees `Outgoing.dropped`.
        """
        with self._write_lock:
            return self.bury(kind, shard, digests)

    def bury(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """Hide everything stored for digests until now, in every process; returns how many were
        here.

        The tombstones reach the log with the next write or `write_control`.
        """
        if not digests:
            return 0
        with self._lock:
            # Records written after the last tombstone carry at least its time plus one.
            stamp = max(int(self.clock.wall() * 1000), self._last_tomb_ms + 1)
            self._last_tomb_ms = stamp
        lo, hi = fmt.key_columns(list(digests))
        entries = np.zeros(len(digests), dtype=fmt.ENTRY)
        entries["key_lo"], entries["key_hi"] = lo, hi
        entries["kind"], entries["shard"] = kind, shard
        entries["flags"] = fmt.FLAG_TOMB_KEY
        entries["created_s"], entries["created_ms"] = stamp // 1000, stamp % 1000
        with self._lock:
            here = int((self._table.find(lo, hi, kind, shard) >= 0).sum())
            for entry in entries:
                self._bury_key(entry)
            if not self.config.read_only:
                self._control.append(entries)
        return here

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
            if self._writer is not None:
                growing = self._writer.open_segments()
                self._writer.seal(lambda number: numbers is None or number in numbers)
                for number in growing - self._writer.open_segments():
                    self.segments.need(self._writer.id, number).sealed = True

    def sync(self) -> None:
        """Make everything written so far survive power loss. raises: OSError."""
        with self._write_lock:
            if self._writer is not None:
                self._writer.sync()

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
        with self._lock:
            used: dict[str, int] = {
                "entries": len(self._table),
                "duplicate_entries": len(self._spares),
                "index_bytes": self._table.nbytes,
                "segments": len(self.segments.all()),
                "breaker_open": int(self.breaker.is_open),
                **self.counts,
            }
        writer = self._writer
        used["written_payload_bytes"] = writer.payload_bytes if writer else 0
        used["written_file_bytes"] = writer.file_bytes if writer else 0
        used["bad_index_frames"] = sum(log.bad_frames for log in self.logs().values())
        return used

    def close(self) -> None:
        """Seal, mark the own log as ended and close every descriptor. raises: OSError."""
        try:
            with self._write_lock:
                if self._control:
                    self._flush_control(self._open_writer())
                if self._writer is not None:
                    self._writer.close()
        finally:
            for log in self.logs().values():
                log.close()
            self.segments.close()

    def _open_writer(self) -> SegmentWriter:
        if self._writer is None:
            quota = self.config.quota_bytes
            segment_bytes = self.config.segment_bytes
            if quota is not None:
                # Deletion works by whole segments: a quota needs several of them to have a choice.
                segment_bytes = min(segment_bytes, max(quota // 8, 2 * fmt.PAGE))
            self._writer = SegmentWriter(
                self.root,
                store=self.store,
                io=self.io,
                clock=self.clock,
                segment_bytes=segment_bytes,
                bucket_s=self.config.bucket_s,
                sync_bytes=self.config.sync_bytes,
                sync_s=self.config.sync_s,
            )
        return self._writer

    def _flush_control(self, writer: SegmentWriter) -> None:
        with self._lock:
            waiting, self._control = self._control, []
        for i, entries in enumerate(waiting):
            try:
                writer.log(entries)
            except OSError:
                with self._lock:
                    self._control[:0] = waiting[i:]
                raise


def _tomb_key(entry: Any) -> tuple[int, int, int, int]:
    return int(entry["key_lo"]), int(entry["key_hi"]), int(entry["kind"]), int(entry["shard"])
