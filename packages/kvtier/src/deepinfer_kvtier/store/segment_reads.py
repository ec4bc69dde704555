"""Verified reads from the segments of a directory, and what follows from those that fail.

A file that is gone, a record that is not where the index says, a device that fails: each is a
status for the records it hit, and the index, the circuit breaker and the counters learn of it.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from numpy.typing import NDArray

from deepinfer_kvtier.breaker import Breaker
from deepinfer_kvtier.io import IoEngine
from deepinfer_kvtier.loads.helping import Urgency
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.index import DirectoryIndex
from deepinfer_kvtier.store.packed_reads import plan_compressed, read_compressed
from deepinfer_kvtier.store.reading import Outcome, Run, Wanted, plan_runs, read_run
from deepinfer_kvtier.store.segments import SegmentSet

_GONE_ERRORS = (errno.ENOENT, errno.ESTALE)


class SegmentReads:
    """Reads of one directory.

    pool, helpers: threads that read and check pieces of a long run, and how many of them at a time.
    quarantine:    called with kind, shard, digest and segment of a slot that does not hold what the
                   index says.
    """

    def __init__(
        self,
        io: IoEngine,
        segments: SegmentSet,
        index: DirectoryIndex,
        breaker: Breaker,
        counts: Counter[str],
        *,
        pool: Executor | None,
        helpers: int,
        quarantine: Callable[[int, int, bytes, int], None],
    ) -> None:
        self._io = io
        self._segments = segments
        self._index = index
        self._breaker = breaker
        self._counts = counts
        self._pool = pool
        self._helpers = helpers
        self._quarantine = quarantine

    def get_into(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        rows: NDArray[Any],
        in_time: Callable[[], bool],
        turn: Urgency,
    ) -> list[Status]:
        """`DirectoryTier.get_into` of records whose places are known."""
        statuses = [Status.MISS] * len(wanted)
        for run in plan_runs(rows, wanted):
            if not in_time():
                for i in run.members:
                    statuses[i] = Status.TIMEOUT
                continue
            statuses_of_run = self._read_one_run(kind, shard, run, wanted, turn)
            for i, status in zip(run.members, statuses_of_run, strict=True):
                statuses[i] = status
        if Status.MISS in statuses:
            self._get_compressed(kind, shard, wanted, rows, statuses, in_time)
        return statuses

    def _read_one_run(
        self, kind: int, shard: int, run: Run, wanted: Sequence[Wanted], turn: Urgency
    ) -> Sequence[Status]:
        members = [wanted[i] for i in run.members]
        pool, helpers = self._pool, self._helpers

        def read(fd: int, at: int) -> Outcome:
            return read_run(self._io, fd, at, kind, shard, members, pool, helpers, turn)

        return self._read_guarded(kind, shard, run, members, read)

    def _get_compressed(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        rows: NDArray[Any],
        statuses: list[Status],
        in_time: Callable[[], bool],
    ) -> None:
        """Read what is stored in fewer bytes than are wanted; sets the statuses of these."""
        for run in plan_compressed(rows, wanted):
            members = [wanted[i] for i in run.members]
            lengths: list[int] = rows["length"][run.members].tolist()

            def read(
                fd: int, at: int, members: list[Wanted] = members, lengths: list[int] = lengths
            ) -> Outcome:
                return read_compressed(self._io, fd, at, kind, shard, members, lengths)

            found: Sequence[Status] = [Status.TIMEOUT] * len(members)
            if in_time():
                found = self._read_guarded(kind, shard, run, members, read)
            for i, status in zip(run.members, found, strict=True):
                statuses[i] = status

    def _read_guarded(
        self,
        kind: int,
        shard: int,
        run: Run,
        members: Sequence[Wanted],
        read: Callable[[int, int], Outcome],
    ) -> Sequence[Status]:
        """`read(descriptor, offset)` of a run: failures become statuses, damage is set aside."""
        if self._breaker.is_open:
            self._counts["breaker_skips"] += 1
            return [Status.ERROR] * len(members)
        segment = self._segments.get(run.segment)
        try:
            fd = self._segments.acquire(run.segment)
            if fd is None:
                self._index.forget_segment(segment)
                return [Status.MISS] * len(members)
            try:
                outcome = read(fd, run.page * fmt.PAGE)
            finally:
                self._segments.release(run.segment)
        except OSError as error:
            if error.errno in _GONE_ERRORS:
                self._index.forget_segment(segment)
                return [Status.MISS] * len(members)
            self._counts["read_errors"] += 1
            self._breaker.error()
            return [Status.ERROR] * len(members)
        self._breaker.success()
        self._counts.update(outcome.counts)
        if outcome.statuses.count(Status.OK) == len(members):
            return outcome.statuses
        for want, status in zip(members, outcome.statuses, strict=True):
            if status is not Status.OK:
                self._quarantine(kind, shard, want.digest, run.segment)
        return outcome.statuses
