"""One list of work, taken from by the calling thread and by threads that help it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.files import IOV_MAX, IoEngine, is_plain, read_fully
from deepinfer_kvtier.base.timing import Breaker
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.index import LogIndex
from deepinfer_kvtier.log.segments import SegmentSet

Item = TypeVar("Item")
Result = TypeVar("Result")


class Urgency(Protocol):
    """How a read lets more urgent ones pass between two of its pieces; larger = more urgent."""

    @property
    def priority(self) -> int: ...

    @property
    def contested(self) -> bool:
        """Whether a more urgent read waits or runs."""
        ...

    def give_way(self) -> None:
        """Let more urgent reads pass, if there are any. Called with no lock held."""
        ...


class _Alone:
    priority = 0
    contested = False

    def give_way(self) -> None:
        """Nobody waits."""


ALONE: Final[Urgency] = _Alone()
"""Of work that nobody queued: it never gives way."""


def with_helpers(
    work: Callable[[bool], Result], pool: Executor | None, helpers: int
) -> list[Result]:
    """Do `work(False)` here and `work(True)` in up to `helpers` threads of a pool.

    returns: what each of those that began has returned, that of this thread first. None of them
             runs any more, also when one raises.
    """
    others = [] if pool is None else [pool.submit(work, True) for _ in range(helpers)]
    try:
        results = [work(False)]
    finally:
        # Nobody may write to the destinations once this call has returned.
        wait([other for other in others if not other.cancel()])
    return results + [other.result() for other in others if not other.cancelled()]


def taken(left: deque[Item], urgency: Urgency, *, helping: bool) -> Iterator[Item]:
    """What this thread takes from the list, until nothing is left.

    urgency: more urgent loads pass between two items; who helps leaves the rest to the caller.
    """
    while left:
        if urgency.contested:
            if helping:
                return
            urgency.give_way()
        try:
            item = left.popleft()
        except IndexError:  # another thread took the last one
            return
        yield item


_MAX_RUN_BYTES = 32 << 20
_NO_SUM = bytes(16)
_SHORT = 240  # bytes; payloads up to there have a sum of another kind, which is not compiled
_GOOD, _CORRUPT, _OTHER, _ABSENT = "ocms"
_STATUS = {_GOOD: Status.OK, _CORRUPT: Status.CORRUPT, _OTHER: Status.MISS, _ABSENT: Status.MISS}
_CACHED_BYTES = 1 << 20  # stays in the second-level cache of one core until it is hashed


class Wanted:
    """One record to read: its full digest and where its bytes go.

    After a read with status OK, the fields with defaults say what the record's trailer said.
    seal: what opens an encrypted record; empty for one in the clear.
    packed: stored bytes, to be opened and then expanded, of an encrypted record that is compressed
            too; None for others, whose bytes are in `views`.
    """

    # Defaults of the class: tens of thousands of these are made in a second.
    parent: bytes = b""
    depth: int = 0
    checksum: bytes = b""
    approximate: bool = False
    generation: int = 0
    seal: bytes = b""
    packed: memoryview | None = None

    def __init__(
        self, digest: bytes, views: Sequence[memoryview], nbytes: int | None = None
    ) -> None:
        self.digest = digest
        self.views = views
        self.nbytes = sum([view.nbytes for view in views]) if nbytes is None else nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slot around it."""
        return fmt.slot_bytes(self.nbytes)


@dataclass(slots=True)
class Run:
    """Slots that lie next to each other in one segment; `members` index the wanted records."""

    segment: int
    page: int
    members: list[int]


@dataclass(slots=True)
class Outcome:
    """Status for each record of a run, and what to count. SKIPPED: good, but not readable here."""

    statuses: list[Status]
    counts: Counter[str]


def plan_runs(rows: NDArray[Any], wanted: Sequence[Wanted]) -> list[Run]:
    """Group the rows that exist and have the expected length into runs, in reading order.

    The records of a run have one length and lie next to each other.
    """
    if (run := _one_run(rows, wanted)) is not None:
        return [run]
    expected = np.array([want.nbytes for want in wanted], dtype=np.uint32)
    there = np.flatnonzero(rows["length"] == expected)
    if not len(there):
        return []
    segments, pages = rows["segment"][there], rows["page"][there].astype(np.int64)
    if (np.diff(pages) <= 0).any() or (segments != segments[0]).any():
        order = np.lexsort((pages, segments))
        there, segments, pages = there[order], segments[order], pages[order]
    lengths = expected[there].astype(np.int64)
    slots = fmt.slot_bytes(lengths)
    joins = (segments[1:] == segments[:-1]) & (lengths[1:] == lengths[:-1])
    joins &= pages[1:] == pages[:-1] + slots[:-1] // fmt.PAGE
    starts = [0, *(np.flatnonzero(~joins) + 1).tolist(), len(there)]
    runs: list[Run] = []
    for start, end in pairwise(starts):
        most = max(1, _MAX_RUN_BYTES // int(slots[start]))
        for at in range(start, end, most):
            members = there[at : min(end, at + most)].tolist()
            runs.append(Run(int(segments[at]), int(pages[at]), members))
    return runs


def _one_run(rows: NDArray[Any], wanted: Sequence[Wanted]) -> Run | None:
    """The usual case: records of one put, as they were written. None for any other."""
    size, slot, count = wanted[0].nbytes, wanted[0].slot_bytes, len(wanted)
    first = rows[0]
    pages = int(first["page"]) + np.arange(count) * (slot // fmt.PAGE)
    same = (rows["page"] == pages).all() and (rows["segment"] == first["segment"]).all()
    if not same or (rows["length"] != size).any() or count * slot > _MAX_RUN_BYTES:
        return None
    if {want.nbytes for want in wanted} != {size}:
        return None
    return Run(int(first["segment"]), int(first["page"]), list(range(count)))


def read_run(
    io: IoEngine,
    fd: int,
    offset: int,
    kind: int,
    shard: int,
    members: Sequence[Wanted],
    pool: Executor | None = None,
    helpers: int = 0,
    urgency: Urgency = ALONE,
) -> Outcome:
    """Read slots that lie next to each other and verify each one. raises: OSError.

    All records have one length. The run is read in pieces that fit the processor's cache, so that
    the checksum finds the bytes there.
    pool: up to `helpers` of its threads take pieces from the same list, as far as they come to it
          before the calling thread has taken them all.
    urgency: more urgent reads pass between two pieces; helpers leave the rest to the caller.
    """
    size, slot = members[0].nbytes, members[0].slot_bytes
    vectors = 1 + max([len(want.views) for want in members])
    step = max(1, min(_CACHED_BYTES // slot, IOV_MAX // vectors))
    tail = slot - size
    tails = bytearray(tail * len(members))
    routines = native.routines if size > _SHORT else None
    sums: list[bytes | None] = [None] * len(members)
    codes = [_ABSENT] * len(members)
    direct = routines if is_plain(io) else None
    expected = size, slot, kind, shard, fmt.FLAG_SEALED
    pieces = deque(range(0, len(members), step))

    def work(helping: bool) -> None:
        for start in taken(pieces, urgency, helping=helping):
            piece = list(members[start : start + step])
            room, at = memoryview(tails)[tail * start :], offset + start * slot
            try:
                if direct is not None:
                    found = direct.read_records(fd, at, piece, room, *expected, 0)
                    got = slot * len(piece) if _ABSENT not in found else 0
                else:
                    found, got = "", _read_piece(io, fd, at, piece, room, tail)
            except OSError:
                pieces.clear()
                raise
            # The bytes behind a short read are whatever the buffer held before.
            if routines is None:
                for i, want in enumerate(piece[: got // slot], start=start):
                    sums[i] = checksum_of(want.views)
            else:
                found = found or routines.read_records(-1, 0, piece, room, *expected, got)
                codes[start : start + len(piece)] = found
            if got < slot * len(piece):
                pieces.clear()

    with_helpers(work, pool, min(helpers, len(pieces) - 1))
    return _outcome(codes if routines else _verify(members, sums, tails, kind, shard), size)


def _outcome(codes: Sequence[str], size: int) -> Outcome:
    """What the verdicts on records of `size` bytes mean."""
    good = codes.count(_GOOD)
    counts = Counter(read_records=good, read_bytes=good * size)
    if good == len(codes):
        return Outcome([Status.OK] * good, counts)
    counts["short_reads"] = codes.count(_ABSENT)
    counts["corrupt"] = codes.count(_CORRUPT)
    counts["digest_mismatch"] = codes.count(_OTHER)
    return Outcome([_STATUS[code] for code in codes], counts)


def _read_piece(
    io: IoEngine,
    fd: int,
    offset: int,
    piece: Sequence[Wanted],
    room: memoryview,
    tail: int,
) -> int:
    """One preadv into the destinations and, `tail` bytes behind each of them, into `room`."""
    buffers: list[memoryview] = []
    at = 0
    for want in piece:
        buffers += want.views
        buffers.append(room[at : at + tail])
        at += tail
    if 0 in [buffer.nbytes for buffer in buffers]:
        buffers = [buffer for buffer in buffers if buffer.nbytes]
    return read_fully(io, fd, buffers, offset, piece[0].slot_bytes * len(piece))


def _verify(
    members: Sequence[Wanted],
    sums: Sequence[bytes | None],
    tails: bytearray,
    kind: int,
    shard: int,
) -> list[str]:
    """Compare trailer, identity and checksum of each record; one without a sum was not read.

    The pure form of what `native.routines.read_records` does.
    """
    size = members[0].nbytes
    at = fmt.trailer_offset(size) - size
    trailers, whole = fmt.trailers_in(tails, members[0].slot_bytes - size, at)
    codes = [_GOOD] * len(members)
    short = sums.count(None)
    meant = (trailers["kind"] == kind) & (trailers["shard"] == shard)
    meant &= trailers["length"] == size
    meant &= _equal(trailers["digest"], [want.digest for want in members])
    right = whole & _equal(trailers["checksum"], [found or _NO_SUM for found in sums])
    if short or not (meant & right).all():
        for i, found in enumerate(sums):
            if found is None:
                codes[i] = _ABSENT
            elif not (whole[i] and (right[i] or not meant[i])):
                codes[i] = _CORRUPT
            elif not meant[i]:
                codes[i] = _OTHER
    parents, depths = trailers["parent"].tobytes(), trailers["depth"].tolist()
    for i, (want, found) in enumerate(zip(members, sums, strict=True)):
        if found is not None:
            want.checksum = found
            want.parent = parents[16 * i : 16 * i + 16]
            want.depth = depths[i]
    flags, generations = trailers["flags"], trailers["generation"]
    for i in np.flatnonzero(flags | generations).tolist():
        members[i].approximate = bool(flags[i] & fmt.FLAG_APPROXIMATE)
        members[i].generation = int(generations[i])
        if flags[i] & fmt.FLAG_SEALED:
            members[i].seal = trailers["extra"][i].tobytes()
    return codes


def _equal(column: NDArray[np.uint8], wanted: Sequence[bytes]) -> NDArray[np.bool_]:
    """For each row of a column of bytes, whether it is what was wanted."""
    expected = np.frombuffer(b"".join(wanted), dtype=np.uint8).reshape(len(wanted), -1)
    return (column == expected).all(axis=1)


_MAX_PACKED_RUN_BYTES: Final = 8 << 20


def plan_compressed(rows: NDArray[Any], wanted: Sequence[Wanted]) -> list[Run]:
    """Group the rows that are shorter than what is wanted into runs, in reading order."""
    expected = np.array([want.nbytes for want in wanted], dtype=np.uint32)
    there = np.flatnonzero(rows["length"] < expected)
    if not len(there):
        return []
    there = there[np.lexsort((rows["page"][there], rows["segment"][there]))]
    segments, pages = rows["segment"][there], rows["page"][there].astype(np.int64)
    slots = fmt.slot_bytes(rows["length"][there].astype(np.int64))
    breaks = (segments[1:] != segments[:-1]) | (pages[1:] != pages[:-1] + slots[:-1] // fmt.PAGE)
    runs: list[Run] = []
    for start, end in pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(there)]):
        at = start
        while at < end:
            most = np.searchsorted(np.cumsum(slots[at:end]), _MAX_PACKED_RUN_BYTES, side="right")
            stop = at + max(1, int(most))
            runs.append(Run(int(segments[at]), int(pages[at]), there[at:stop].tolist()))
            at = stop
    return runs


def read_compressed(
    io: IoEngine,
    fd: int,
    offset: int,
    kind: int,
    shard: int,
    members: Sequence[Wanted],
    lengths: Sequence[int],
) -> Outcome:
    """Read slots that lie next to each other and verify each one. raises: OSError.

    lengths: stored bytes of each record, which end up in `Wanted.packed`.
    """
    slots = [fmt.slot_bytes(length) for length in lengths]
    room: NDArray[np.uint8] = np.empty(sum(slots), dtype=np.uint8)
    got = read_fully(io, fd, [room.data], offset, room.nbytes)
    starts = [0, *np.cumsum(slots).tolist()]
    statuses = [Status.MISS] * len(members)
    whole = sum(end <= got for end in starts[1:])
    counts: Counter[str] = Counter(short_reads=len(members) - whole)
    for i in range(whole):
        slot = room[starts[i] : starts[i + 1]].data
        trailer = slot[fmt.trailer_offset(lengths[i]) :][: fmt.TRAILER_BYTES]
        statuses[i] = check_packed(
            slot[: lengths[i]], fmt.parse_trailer(trailer), members[i], kind, shard, counts
        )
    return Outcome(statuses, counts)


def check_packed(
    stored: memoryview,
    trailer: fmt.Trailer | None,
    want: Wanted,
    kind: int,
    shard: int,
    counts: Counter[str],
) -> Status:
    """Verify the stored bytes of one compressed record, and leave them in `want.packed`."""
    if trailer is None:
        counts["corrupt"] += 1
        return Status.CORRUPT
    expected = (want.digest, kind, shard, stored.nbytes, want.nbytes)
    found = (trailer.digest, trailer.kind, trailer.shard, trailer.payload_bytes)
    if (*found, trailer.expanded_bytes) != expected:
        counts["digest_mismatch"] += 1
        return Status.MISS
    if checksum_of([stored]) != trailer.checksum:
        counts["corrupt"] += 1
        return Status.CORRUPT
    want.parent = trailer.parent
    want.depth = trailer.depth
    want.approximate = bool(trailer.flags & fmt.FLAG_APPROXIMATE)
    want.generation = trailer.generation
    want.seal = trailer.extra if trailer.flags & fmt.FLAG_SEALED else b""
    want.packed = stored
    counts["read_records"] += 1
    counts["read_bytes"] += want.nbytes
    return Status.OK


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
        index: LogIndex,
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
        urgency: Urgency,
    ) -> list[Status]:
        """`DiskTier.get_into` of records whose places are known."""
        statuses = [Status.MISS] * len(wanted)
        for run in plan_runs(rows, wanted):
            if not in_time():
                for i in run.members:
                    statuses[i] = Status.TIMEOUT
                continue
            statuses_of_run = self._read_one_run(kind, shard, run, wanted, urgency)
            for i, status in zip(run.members, statuses_of_run, strict=True):
                statuses[i] = status
        if Status.MISS in statuses:
            self._get_compressed(kind, shard, wanted, rows, statuses, in_time)
        return statuses

    def _read_one_run(
        self, kind: int, shard: int, run: Run, wanted: Sequence[Wanted], urgency: Urgency
    ) -> Sequence[Status]:
        members = [wanted[i] for i in run.members]
        pool, helpers = self._pool, self._helpers

        def read(fd: int, at: int) -> Outcome:
            return read_run(self._io, fd, at, kind, shard, members, pool, helpers, urgency)

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
        try:
            outcome = self._read_held(run, read)
        except OSError:
            # What a mount or a device says once is no word about the file: its records stay.
            self._counts["read_errors"] += 1
            self._breaker.error()
            return [Status.ERROR] * len(members)
        if outcome is None:
            self._index.forget_segment(self._segments.get(run.segment))
            return [Status.MISS] * len(members)
        self._breaker.success()
        self._counts.update(outcome.counts)
        if outcome.statuses.count(Status.OK) == len(members):
            return outcome.statuses
        for want, status in zip(members, outcome.statuses, strict=True):
            if status is not Status.OK:
                self._quarantine(kind, shard, want.digest, run.segment)
        return outcome.statuses

    def _read_held(self, run: Run, read: Callable[[int, int], Outcome]) -> Outcome | None:
        """Read with the descriptor that is there; if that fails, once more with a fresh one.

        returns: None when there is no such file. raises: OSError.
        """
        fd = self._segments.acquire(run.segment)
        if fd is None:
            return None
        try:
            try:
                return read(fd, run.page * fmt.PAGE)
            except OSError:
                self._counts["reopened_segments"] += 1
                fresh = self._segments.reopen(run.segment)
                return None if fresh is None else read(fresh, run.page * fmt.PAGE)
        finally:
            self._segments.release(run.segment)
