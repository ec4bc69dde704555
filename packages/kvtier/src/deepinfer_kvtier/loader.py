"""Loads: host memory first, then down the tiers; concurrent loads of a record share one read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.clock import Clock
from deepinfer_kvtier.directory import DirectoryTier
from deepinfer_kvtier.host import HostRecord, HostTier
from deepinfer_kvtier.metrics import Histogram
from deepinfer_kvtier.queue import copy_views
from deepinfer_kvtier.reading import Wanted
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.table import NO_ROW
from deepinfer_kvtier.tier import GuardedTier


class Flights:
    """Who reads which record from a tier below host memory right now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[tuple[int, bytes], threading.Event] = {}

    def claim(self, kind: int, digests: Sequence[bytes]) -> dict[bytes, threading.Event]:
        """Claim what nobody reads yet; returns the events of those that somebody else reads."""
        others: dict[bytes, threading.Event] = {}
        mine = threading.Event()
        with self._lock:
            for digest in digests:
                event = self._events.setdefault((kind, digest), mine)
                if event is not mine:
                    others[digest] = event
        return others

    def land(self, kind: int, digests: Sequence[bytes]) -> None:
        """The claimed reads have ended, well or not."""
        with self._lock:
            events = {self._events.pop((kind, digest)) for digest in digests}
        for event in events:
            event.set()


class Loader:
    """Fills caller buffers from the tiers of one cache."""

    def __init__(
        self,
        host: HostTier,
        directory: DirectoryTier | None,
        further: Sequence[GuardedTier],
        clock: Clock,
    ) -> None:
        self._host = host
        self._directory = directory
        self._further = further
        self._clock = clock
        self._flights = Flights()
        self._counts_lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.seconds = Histogram()

    def fill(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        *,
        leased: Sequence[HostRecord | None] | None,
        rows: NDArray[Any] | None,
        deadline: float | None,
        report: Callable[[int, Status], None],
    ) -> list[Status]:
        """Status for each record; `report(index, status)` is called as soon as one is settled.

        leased:   records in memory that a lease pins.
        rows:     places pinned by a lease, used before the index is asked.
        deadline: monotonic seconds after which nothing more is started.
        """

        def in_time() -> bool:
            return deadline is None or self._clock.monotonic() < deadline

        statuses: list[Status | None] = [None] * len(wanted)

        def settle(i: int, status: Status) -> None:
            statuses[i] = status
            report(i, status)

        absent: list[int] = []
        records = self._host.pin_all(kind, [want.digest for want in wanted], leased)
        try:
            for i, (want, record) in enumerate(zip(wanted, records, strict=True)):
                if not in_time():
                    settle(i, Status.TIMEOUT)
                elif record is not None and self._copy(record, want):
                    settle(i, Status.OK)
                else:
                    absent.append(i)
        finally:
            self._host.unpin(record for record in records if record is not None)
        if absent:
            self._from_below(kind, shard, wanted, absent, rows, deadline, in_time, settle)
        final = [status or Status.MISS for status in statuses]
        self._count(final)
        return final

    def observe(self, nbytes: int, seconds: float) -> None:
        """Count one finished load."""
        with self._counts_lock:
            self.counts["load_bytes"] += nbytes
            self.seconds.observe(seconds)

    def _from_below(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        absent: list[int],
        rows: NDArray[Any] | None,
        deadline: float | None,
        in_time: Callable[[], bool],
        settle: Callable[[int, Status], None],
    ) -> None:
        others = self._flights.claim(kind, [wanted[i].digest for i in absent])
        mine = [i for i in absent if wanted[i].digest not in others]
        try:
            self._read(kind, shard, wanted, mine, rows, in_time, settle)
        finally:
            self._flights.land(kind, [wanted[i].digest for i in mine])
        again: list[int] = []
        for i in absent:
            event = others.get(wanted[i].digest)
            if event is None:
                continue
            left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
            event.wait(left)
            if self._copy_from_host(kind, wanted[i]):
                with self._counts_lock:
                    self.counts["shared_reads"] += 1
                settle(i, Status.OK)
            else:
                again.append(i)
        # The other reader failed, or host memory had no room for what it read.
        self._read(kind, shard, wanted, again, rows, in_time, settle)

    def _read(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        which: list[int],
        rows: NDArray[Any] | None,
        in_time: Callable[[], bool],
        settle: Callable[[int, Status], None],
    ) -> None:
        if not which:
            return
        members = [wanted[i] for i in which]
        statuses = [Status.MISS] * len(members)
        if self._directory is not None:
            leased = None if rows is None else rows[np.array(which)]
            statuses = self._read_directory(self._directory, kind, shard, members, leased, in_time)
        for tier in self._further:
            left = [j for j, status in enumerate(statuses) if status is not Status.OK]
            if not left:
                break
            lower = tier.get_into(kind, shard, [members[j] for j in left], in_time=in_time)
            for j, status in zip(left, lower, strict=True):
                if status is not Status.MISS:
                    statuses[j] = status
        for i, want, status in zip(which, members, statuses, strict=True):
            if status is Status.OK:
                self._promote(kind, want)
            settle(i, status)

    def _read_directory(
        self,
        directory: DirectoryTier,
        kind: int,
        shard: int,
        members: Sequence[Wanted],
        leased: NDArray[Any] | None,
        in_time: Callable[[], bool],
    ) -> list[Status]:
        if leased is not None and (leased["length"] == NO_ROW).any():
            leased = None
        statuses = directory.get_into(kind, shard, members, rows=leased, in_time=in_time)
        missed = [j for j, status in enumerate(statuses) if status is Status.MISS]
        if missed and leased is not None:
            # The leased place is gone; another writer may have stored the same record.
            second = directory.get_into(kind, shard, [members[j] for j in missed], in_time=in_time)
            for j, status in zip(missed, second, strict=True):
                statuses[j] = status
        return statuses

    def _copy_from_host(self, kind: int, want: Wanted) -> bool:
        record = self._host.pin(kind, want.digest)
        if record is None:
            return False
        try:
            return self._copy(record, want)
        finally:
            self._host.unpin([record])

    def _copy(self, record: HostRecord, want: Wanted) -> bool:
        """Bytes of a pinned record into the destination; False when it turns out to be bad."""
        if record.data.nbytes != want.nbytes:
            return False
        source, at = record.data.data, 0
        for view in want.views:
            end = at + view.nbytes
            if end > at:  # an empty view may be a read-only stand-in
                view[:] = source[at:end]
            at = end
        if self._host.verified(record):
            return True
        self._host.remove(record.kind, record.digest)
        return False

    def _promote(self, kind: int, want: Wanted) -> None:
        if want.nbytes > self._host.capacity_bytes or self._host.contains(kind, want.digest):
            return
        data = self._host.take(kind, want.nbytes)
        if data is None:
            return
        copy_views(want.views, data)
        record = HostRecord(
            kind,
            want.digest,
            want.parent,
            want.depth,
            data,
            want.approximate,
            want.generation,
            want.checksum,
        )
        self._host.unpin([self._host.publish(record)])

    def _count(self, statuses: Sequence[Status]) -> None:
        with self._counts_lock:
            self.counts.update(f"records_{status.value}" for status in statuses)
