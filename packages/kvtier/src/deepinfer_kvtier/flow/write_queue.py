"""What waits in a write queue, who waits for it, and when there is no room for more."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import checksums_of, copy_views
from deepinfer_kvtier.base.config import KVTierConfig
from deepinfer_kvtier.base.timing import Breaker
from deepinfer_kvtier.base.values import KIND_CODES, FlushReport, Status, quality_of
from deepinfer_kvtier.flow.encode import PLAIN, Encoder, Encoding
from deepinfer_kvtier.flow.handles import Durability, PutTicket
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.log.format import EncodedRecord, note_changes

_BLOCK: Final = KIND_CODES["block"]
SCRATCH_SHARE: Final = 0.75  # of the budget; beyond it records of short life are refused
CONTINUING_SHARE: Final = 0.9  # beyond it only what continues chains on disk is taken


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One record in the queue with everybody who waits for it.

    held:   the host record whose memory is written; pinned until the item leaves the queue.
    staged: False while the bytes still lie in the caller's buffer.
    source: where the caller's bytes lie, as long as they are not staged.
    encoded: done when the record is ready to be stored.
    owned:  the bytes lie in memory of the queue's own, for want of room in host memory.
    orphaned: a record before it in its chain could not be written: this one is not written either.
    """

    record: EncodedRecord
    held: HostRecord | None
    staged: bool
    queued_at: float
    source: Sequence[memoryview] = ()
    owned: bool = False
    orphaned: bool = False
    encoding: Encoding = PLAIN
    encoded: Future[None] | None = None
    waiters: Sequence[tuple[PutTicket, int, Durability]] = ()

    @property
    def key(self) -> tuple[int, bytes]:
        return self.record.kind, self.record.digest

    def follows(self) -> tuple[int, bytes]:
        """Key of the block without which nobody would ask for this record."""
        out = self.record
        return _BLOCK, out.digest if out.kind != _BLOCK else out.parent


Fates = dict[PutTicket, list[tuple[int, bool]]]


def queue_refusal(
    *, queued_bytes: int, limit: int, nbytes: int, cls: str, continues: bool
) -> str | None:
    """Why a record may not join the queue, or None.

    Above 75% scratch is refused, above 90% everything but continuations of chains that are on disk
    already, at 100% all.
    """
    filled = (queued_bytes + nbytes) / limit
    if filled > 1:
        return "queue_full"
    if filled > CONTINUING_SHARE and not continues:
        return "queue_full"
    if filled > SCRATCH_SHARE and cls == "scratch":
        return "class_pressure"
    return None


def compare(records: Sequence[EncodedRecord], copies: Sequence[NDArray[np.uint8]]) -> None:
    """Set `changed` where a copy taken from a source is not what was handed over and summed."""
    summed = [
        (out, copy)
        for out, copy in zip(records, copies, strict=True)
        if out.content_checksum is not None and not out.changed
    ]
    sums = checksums_of([[copy.data] for _, copy in summed])
    for (out, _), found in zip(summed, sums, strict=True):
        out.changed = found != out.content_checksum


def report_all(fates: Fates) -> None:
    """Tell every ticket the fates of its records."""
    for ticket, of_records in fates.items():
        ticket.report(of_records)


def host_record(out: EncodedRecord, data: NDArray[np.uint8]) -> HostRecord:
    """The record in host memory whose bytes are in `data`."""
    marks = quality_of(out.origin.approximate, out.origin.generation)
    return HostRecord(out.kind, out.digest, out.parent, out.depth, data, marks)


def add_waiter(item: QueueEntry, ticket: PutTicket, index: int, want: Durability) -> None:
    """One more who wants to know what becomes of an item."""
    ticket.expect()
    item.waiters = [*item.waiters, (ticket, index, want)]


logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 5
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 5.0
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_FINAL = (Status.OK, Status.SKIPPED)


class WriteTarget(Protocol):
    """What a queue writes to: the local directory, or a further tier behind its guard.

    validates: it compares borrowed records with their checksums before they become visible.
    """

    validates: bool

    @property
    def write_breaker(self) -> Breaker: ...

    def put_from(self, batch: Sequence[EncodedRecord]) -> Sequence[Status]: ...

    def write_control(self) -> None: ...

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int: ...

    def sync(self) -> None: ...

    def sync_in_s(self) -> float: ...


@dataclass(slots=True)
class Written:
    """What became of a batch: the `id` of items now stored, and the items that were given up."""

    stored: set[int] = field(default_factory=set[int])
    failed: list[QueueEntry] = field(default_factory=list[QueueEntry])


class RetryingWriter:
    """How one queue's thread writes to its tier.

    on_stored: called with what was written.
    timed:     called with the bytes and the seconds of every write.
    maintain:  called when the tier is full.
    pause:     waits so many seconds; True when the cache gives up meanwhile.
    """

    def __init__(
        self,
        target: WriteTarget,
        *,
        counts: Counter[str],
        on_stored: Callable[[Sequence[EncodedRecord]], None],
        timed: Callable[[int, float], None],
        maintain: Callable[[], None],
        pause: Callable[[float], bool],
    ) -> None:
        self._target = target
        self._counts = counts
        self._on_stored = on_stored
        self._timed = timed
        self._maintain = maintain
        self._pause = pause
        self.failing: str | None = None
        """Why the last write failed for good; None once one has worked again."""

    def write(self, items: Sequence[QueueEntry]) -> Written:
        """Write `items`, parents first."""
        result = Written()
        left, groups = list(items), [list(items)]
        backoff = BACKOFF_FIRST_S
        for attempt in range(MAX_ATTEMPTS):
            if not left:
                return result
            if self._target.write_breaker.is_open:
                self._counts["breaker_drops"] += len(left)
                break
            full = False
            remaining: list[QueueEntry] = []
            for group in groups:
                failed, group_full = self._write_group(group, result)
                remaining += failed
                full |= group_full
            if not remaining:
                self._target.write_breaker.success()
                self.failing = None
                return result
            self.failing = "disk_full" if full else "write_failed"
            left, groups = remaining, chains_of(remaining)
            self._counts["write_errors"] += 1
            if full:
                self._counts["disk_full_errors"] += 1
                self._maintain()
            elif not result.stored:
                self._target.write_breaker.error()  # else it is not the tier that fails
            if attempt + 1 == MAX_ATTEMPTS or self._pause(backoff):
                break
            backoff = min(2 * backoff, BACKOFF_MAX_S)
        self._counts["failed_records"] += len(left)
        result.failed += left
        return result

    def _write_group(
        self, group: list[QueueEntry], result: Written
    ) -> tuple[list[QueueEntry], bool]:
        """What has to be tried again, and whether the tier said it is full."""
        started = time.perf_counter()
        try:
            statuses = self._target.put_from([item.record for item in group])
            if any(want == "fsync" for item in group for _, _, want in item.waiters):
                self._target.sync()
        except OSError as error:
            return group, error.errno in _FULL_ERRORS
        except Exception:
            if len(chains_of(group)) > 1:
                return group, False  # the next attempt finds out which chain it is
            logger.exception("a tier failed in a way no tier may, %d records are lost", len(group))
            self._counts["failed_records"] += len(group)
            result.failed += group
            return [], False
        done = [i for i, s in zip(group, statuses, strict=True) if s is Status.OK]
        result.stored.update(map(id, done))
        nbytes = sum([item.record.nbytes for item in done])
        self._timed(nbytes, time.perf_counter() - started)
        if done:
            self._on_stored([item.record for item in done if not item.record.dropped])
        left = [i for i, s in zip(group, statuses, strict=True) if s not in _FINAL]
        return left, Status.FULL in statuses


def chains_of(items: Sequence[QueueEntry]) -> list[list[QueueEntry]]:
    """Items by what they build on, each group in its former order; parents come before children."""
    group_of: dict[tuple[int, bytes], list[QueueEntry]] = {}
    groups: list[list[QueueEntry]] = []
    for item in items:
        group = group_of.get(item.follows())
        if group is None:
            group = []
            groups.append(group)
        group.append(item)
        group_of[item.key] = group
    return groups


_ENCODED_AT_ONCE = 16


class WriteQueue:
    """Queue and writing thread of one tier.

    on_stored: called with what was written, in the writing thread.
    timed:     called with the bytes and the seconds of every write.
    maintain:  periodic work of the tier; also called when it is full.
    hand_on:   called with every batch that leaves the queue, written or not, while its memory is
               still pinned.
    """

    def __init__(
        self,
        target: WriteTarget,
        host: HostTier,
        config: KVTierConfig,
        *,
        name: str,
        on_stored: Callable[[Sequence[EncodedRecord]], None],
        timed: Callable[[int, float], None],
        maintain: Callable[[], None],
        hand_on: Callable[[Sequence[QueueEntry]], None] | None = None,
    ) -> None:
        self.name = name
        self._target = target
        self._hand_on = hand_on
        self._host = host
        self._config = config
        self._maintain = maintain
        self._cond = threading.Condition()
        self._items: deque[QueueEntry] = deque()
        self._by_key: dict[tuple[int, bytes], QueueEntry] = {}
        self._bytes = 0
        self._writing = 0
        self._flushing = 0
        self._closing = False
        self._give_up = False
        self.counts: Counter[str] = Counter()
        self._attempts = RetryingWriter(
            target,
            counts=self.counts,
            on_stored=on_stored,
            timed=timed,
            maintain=self._maintain_or_say,
            pause=self._pause,
        )
        self._next_maintenance = time.monotonic() + config.gc_interval_s
        # Encoding runs ahead of the writes, in the order of the queue.
        self._encoder = Encoder(f"kvtier-sum-{name}")
        self._thread = threading.Thread(target=self._run, name=f"kvtier-write-{name}", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> str | None:
        """Why records are not stored now: "disk_full", "write_failed"; None = they are."""
        return self._attempts.failing

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait or are being written."""
        return self._bytes

    def refusal(self, cls: str, nbytes: int, continues: bool) -> str | None:
        """Whether one more record may join now."""
        return queue_refusal(
            queued_bytes=self._bytes,
            limit=self._config.queue_bytes,
            nbytes=nbytes,
            cls=cls,
            continues=continues,
        )

    def takes(self, keys: Sequence[tuple[int, bytes]], nbytes: int) -> bool:
        """Whether none of these records waits here already and there is room for any class."""
        room = SCRATCH_SHARE * self._config.queue_bytes
        return self._bytes + nbytes <= room and self._by_key.keys().isdisjoint(keys)

    def join(self, key: tuple[int, bytes], ticket: PutTicket, index: int, want: Durability) -> bool:
        """Wait for a record that is queued already; False when it is not (any more)."""
        if key not in self._by_key:  # most are not, and the writing thread may hold the lock
            return False
        with self._cond:
            item = self._by_key.get(key)
            if item is None or item.record.dropped:
                return False
            add_waiter(item, ticket, index, want)
            return True

    def add(self, items: Sequence[QueueEntry]) -> None:
        """Queue records, parents first."""
        by_key: dict[tuple[int, bytes], QueueEntry] = {}
        nbytes = 0
        to_encode: list[QueueEntry] = []
        encoding, plain = PLAIN, True
        for item in items:
            record = item.record
            by_key[record.origin.kind, record.digest] = item
            # Before a thread may compress it; what is taken off again is `content_bytes`.
            nbytes += record.expanded_bytes or record.nbytes
            if item.encoding is not encoding:
                encoding, plain = item.encoding, item.encoding.is_plain
            if plain and record.checksum is None and record.content_checksum:
                record.checksum = record.content_checksum  # no thread has to wake up for it
            elif not plain or record.checksum is None:
                to_encode.append(item)
        for start in range(0, len(to_encode), _ENCODED_AT_ONCE):
            some = to_encode[start : start + _ENCODED_AT_ONCE]
            encoded = self._encoder.submit([(item.record, item.encoding) for item in some])
            for item in some:
                item.encoded = encoded
        with self._cond:
            self._items.extend(items)
            self._by_key.update(by_key)
            self._bytes += nbytes
            self._cond.notify_all()

    def add_copies(self, items: Sequence[QueueEntry]) -> None:
        """Queue records that another queue is done with, for this tier too.

        Only memory of the cache is read later, never a caller's; without room the record is skipped
        and counted, since nobody waits for it.
        """
        if self._closing:
            return
        copies: list[QueueEntry] = []
        waiting = 0
        for item in items:
            out = item.record
            if out.dropped:
                continue
            if item.held is None and not item.owned:
                self.counts["skipped_unstaged"] += 1
            elif self.refusal(out.cls, out.content_bytes + waiting, False) is not None:
                self.counts["skipped_full"] += 1
            else:
                if item.held is not None:
                    self._host.pin_again(item.held)
                waiting += out.content_bytes
                copies.append(
                    QueueEntry(
                        replace(out),
                        item.held,
                        staged=True,
                        queued_at=time.monotonic(),
                    )
                )
        if copies:
            self.add(copies)

    def discard(self, kind: int, digests: Iterable[bytes]) -> None:
        """Do not write these records any more if they are still waiting."""
        with self._cond:
            for digest in digests:
                item = self._by_key.get((kind, digest))
                if item is not None:
                    item.record.dropped = True

    def flush(self, timeout: float, *, fsync: bool) -> FlushReport:
        """Write what is queued now; waits at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._cond:
            self._flushing += 1
            self._cond.notify_all()
            try:
                while self._items or self._writing:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._thread.is_alive():
                        break
                    self._cond.wait(left)
            finally:
                self._flushing -= 1
            pending = len(self._items) + self._writing
        synced = True
        try:
            self._target.write_control()
            if fsync:
                self._target.sync()
        except OSError:
            self.counts["write_errors"] += 1
            synced = False
        return FlushReport(pending == 0 and synced, pending, self.counts["failed_records"])

    def close(self, timeout: float) -> FlushReport:
        """Flush, then stop the thread; what could not be written in time is given up."""
        report = self.flush(timeout, fsync=False)
        with self._cond:
            self._closing = True
            self._give_up = True
            self._cond.notify_all()
        self._thread.join(timeout + BACKOFF_MAX_S)
        self._encoder.close()
        return report

    @property
    def stopped(self) -> bool:
        """Whether the writing thread has ended; a call into a hung file system may keep it."""
        return not self._thread.is_alive()

    # -- the thread

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                break
            if batch:
                self._write_or_lose(batch)
            if self._target.sync_in_s() <= 0:
                self._sync()
            if time.monotonic() >= self._next_maintenance:
                self._maintain_or_say()
                self._next_maintenance = time.monotonic() + self._config.gc_interval_s
        with self._cond:
            left, self._items = list(self._items), deque[QueueEntry]()
        self._finish(left, stored=set())

    def _maintain_or_say(self) -> None:
        """Whatever periodic work comes to, records are written after it."""
        try:
            self._maintain()
        except Exception:
            logger.exception("periodic work of the tier %s failed", self.name)
            self.counts["maintenance_errors"] += 1

    def _next_batch(self) -> list[QueueEntry] | None:
        """Records to write now; empty when it is time for other work; None at the end."""
        with self._cond:
            while True:
                if self._closing and (self._give_up or not self._items):
                    return None
                wait = self._wait_s()
                if wait <= 0:
                    return self._take_batch()
                until_maintenance = self._next_maintenance - time.monotonic()
                until_work = min(until_maintenance, self._target.sync_in_s())
                if until_work <= 0:
                    return []
                self._cond.wait(min(wait, until_work))

    def _sync(self) -> None:
        try:
            self._target.sync()
        except OSError:
            self.counts["write_errors"] += 1
            self._target.write_breaker.error()

    def _wait_s(self) -> float:
        if not self._items:
            return float("inf")
        full = len(self._items) >= self._config.commit_blocks
        if full or self._flushing or self._bytes >= self._config.commit_bytes:
            return 0
        return self._items[0].queued_at + self._config.commit_delay_s - time.monotonic()

    def _take_batch(self) -> list[QueueEntry]:
        batch: list[QueueEntry] = []
        size = 0
        while self._items and len(batch) < self._config.commit_blocks:
            nbytes = self._items[0].record.nbytes
            if batch and size + nbytes > self._config.commit_bytes:
                break
            batch.append(self._items.popleft())
            size += nbytes
        self._writing = len(batch)
        return batch

    def _write_or_lose(self, batch: list[QueueEntry]) -> None:
        """A tier may raise OSError; whatever else one raises costs these records, not the thread,
        without which every later put would wait for nothing."""
        try:
            self._write(batch)
        except Exception:
            logger.exception("a tier failed in a way no tier may, %d records are lost", len(batch))
            self.counts["failed_records"] += len(batch)

    def _write(self, batch: list[QueueEntry]) -> None:
        stored: set[int] = set()
        try:
            for encoded in {item.encoded for item in batch}:
                if encoded is not None:
                    encoded.result()
            self._stage(batch)
            live = [i for i in batch if not (i.record.dropped or i.record.changed)]
            for item in live:
                if item.held is not None:
                    item.held.checksum = item.record.content_checksum
            written = self._attempts.write([item for item in live if not item.orphaned])
            stored = written.stored
            if written.failed:
                self._orphan(written.failed)
                why = self._attempts.failing or "write_failed"
                for item in written.failed:
                    for ticket, index, _ in item.waiters:
                        ticket.note(index, why)
            if self._hand_on is not None:
                self._hand_on([item for item in live if not item.record.changed])
        finally:
            self._finish(batch, stored=stored)

    def _stage(self, batch: list[QueueEntry]) -> None:
        """Take the bytes of unstaged records over into host memory, so that sources become free."""
        fresh = [item for item in batch if not item.staged]
        sizes = {(item.record.kind, item.record.content_bytes) for item in fresh}
        for kind, nbytes in sizes:
            if nbytes > self._host.capacity_bytes:
                continue
            wanted = kind, nbytes
            some = [i for i in fresh if (i.record.kind, i.record.content_bytes) == wanted]
            arrays = self._host.take_many(kind, nbytes, len(some))
            made: list[HostRecord] = []
            kept: list[QueueEntry] = []
            some = some[: len(arrays)]
            for item, data in zip(some, arrays, strict=True):
                copy_views(item.source, data)
            compare([item.record for item in some], arrays)
            for item, data in zip(some, arrays, strict=True):
                if item.record.changed:
                    self._host.give(data)
                else:
                    made.append(host_record(item.record, data))
                    kept.append(item)
            for item, record in zip(kept, self._host.publish_all(made), strict=True):
                item.held = record
                if item.record.verbatim:
                    item.record.views = [record.data.data]
                    item.record.borrowed = False
        for item in fresh:
            out = item.record
            if out.borrowed and not out.changed and not self._target.validates:
                # What is stored there is visible at once, so it has to be checked before.
                out.views = [memoryview(b"".join(out.views))]
                note_changes([out])
                out.borrowed = False
            item.staged = True
            item.owned = item.held is None and not out.borrowed
        free = [i for i in fresh if (i.held is not None or i.owned) and not i.record.changed]
        self._release_sources(free)

    def _release_sources(self, items: Sequence[QueueEntry]) -> None:
        """Tell those who only wait for the source to be free."""
        fates: Fates = {}
        with self._cond:
            for item in items:
                for ticket, index, want in item.waiters:
                    if want == "behind":
                        fates.setdefault(ticket, []).append((index, True))
                item.waiters = [w for w in item.waiters if w[2] != "behind"]
        report_all(fates)

    def _orphan(self, failed: Sequence[QueueEntry]) -> None:
        """What waits and builds on records that could not be written is given up with them."""
        gone = {item.key for item in failed}
        with self._cond:
            for item in self._items:
                if item.follows() in gone and not item.orphaned:
                    item.orphaned = True
                    gone.add(item.key)
                    self.counts["failed_records"] += 1

    def _pause(self, seconds: float) -> bool:
        """Wait before the next attempt; True when the cache gives up meanwhile."""
        with self._cond:
            return self._cond.wait_for(lambda: self._give_up, seconds)

    def _finish(self, batch: list[QueueEntry], *, stored: set[int]) -> None:
        """Every pin, byte and waiter of a batch is settled here, whatever happened to it."""
        fates: Fates = {}
        self._expose(batch)
        with self._cond:
            for item in batch:
                self._bytes -= item.record.content_bytes
                if self._by_key.get(item.key) is item:
                    del self._by_key[item.key]
                good = id(item) in stored and not (item.record.dropped or item.record.changed)
                for ticket, index, _ in item.waiters:
                    fates.setdefault(ticket, []).append((index, good))
            self._writing = 0
            self._cond.notify_all()
        self._host.unpin(item.held for item in batch if item.held is not None)
        report_all(fates)

    def _expose(self, batch: list[QueueEntry]) -> None:
        """Say which sources were changed while they belonged to the cache."""
        changed = [item for item in batch if item.record.changed]
        if not changed:
            return
        if not self.counts["source_changed"]:
            logger.warning(
                "a source of put(copy=False) was changed before its ticket was done: %d records are"
                " not stored; wait for the ticket before reusing the memory",
                len(changed),
            )
        self.counts["source_changed"] += len(changed)
        for item in changed:
            for ticket, index, _ in item.waiters:
                ticket.note(index, "source_changed")
