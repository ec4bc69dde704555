"""Verified reads: contiguous slots in one system call, nothing believed before its checksum."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.io import IOV_MAX, IoEngine, read_fully
from deepinfer_kvtier.loads.helping import ALONE, Urgency, taken, with_helpers
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store import format as fmt

_MAX_RUN_BYTES = 32 << 20
_NO_SUM = bytes(16)
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
    expected = np.array([want.nbytes for want in wanted], dtype=np.uint32)
    there = np.flatnonzero(rows["length"] == expected)
    if not len(there):
        return []
    there = there[np.lexsort((rows["page"][there], rows["segment"][there]))]
    segments, pages = rows["segment"][there], rows["page"][there].astype(np.int64)
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


def read_run(
    io: IoEngine,
    fd: int,
    offset: int,
    kind: int,
    shard: int,
    members: Sequence[Wanted],
    pool: Executor | None = None,
    helpers: int = 0,
    turn: Urgency = ALONE,
) -> Outcome:
    """Read slots that lie next to each other and verify each one. raises: OSError.

    All records have one length. The run is read in pieces that fit the processor's cache, so that
    the checksum finds the bytes there.
    pool: up to `helpers` of its threads take pieces from the same list, as far as they come to it
          before the calling thread has taken them all.
    turn: more urgent reads pass between two pieces; helpers leave the rest to the calling thread.
    """
    size, slot = members[0].nbytes, members[0].slot_bytes
    vectors = max([len(want.views) for want in members]) + 1
    step = max(1, min(_CACHED_BYTES // slot, IOV_MAX // vectors))
    tails = bytearray((slot - size) * len(members))
    sums: list[bytes | None] = [None] * len(members)
    pieces = deque(range(0, len(members), step))

    def work(helping: bool) -> None:
        for start in taken(pieces, turn, helping=helping):
            piece = members[start : start + step]
            room = memoryview(tails)[(slot - size) * start :]
            try:
                got = _read_piece(io, fd, offset + start * slot, piece, room, slot - size)
            except OSError:
                pieces.clear()
                raise
            # The bytes behind a short read are whatever the buffer held before.
            for i, want in enumerate(piece[: got // slot], start=start):
                sums[i] = checksum_of(want.views)
            if got < slot * len(piece):
                pieces.clear()

    with_helpers(work, pool, min(helpers, len(pieces) - 1))
    return _verify(members, sums, tails, kind, shard)


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
) -> Outcome:
    """Compare trailer, identity and checksum of each record; one without a sum was not read."""
    size = members[0].nbytes
    at = fmt.trailer_offset(size) - size
    trailers, whole = fmt.trailers_in(tails, members[0].slot_bytes - size, at)
    statuses = [Status.OK] * len(members)
    short = sums.count(None)
    meant = (trailers["kind"] == kind) & (trailers["shard"] == shard)
    meant &= trailers["length"] == size
    meant &= _equal(trailers["digest"], [want.digest for want in members])
    right = whole & _equal(trailers["checksum"], [found or _NO_SUM for found in sums])
    if short or not (meant & right).all():
        for i, found in enumerate(sums):
            if found is None:
                statuses[i] = Status.MISS
            elif not (whole[i] and (right[i] or not meant[i])):
                statuses[i] = Status.CORRUPT
            elif not meant[i]:
                statuses[i] = Status.MISS
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
    good = statuses.count(Status.OK)
    counts = Counter(read_records=good, read_bytes=good * size)
    if good < len(members):
        counts["short_reads"] = short
        counts["corrupt"] = statuses.count(Status.CORRUPT)
        counts["digest_mismatch"] = statuses.count(Status.MISS) - short
    return Outcome(statuses, counts)


def _equal(column: NDArray[np.uint8], wanted: Sequence[bytes]) -> NDArray[np.bool_]:
    """For each row of a column of bytes, whether it is what was wanted."""
    expected = np.frombuffer(b"".join(wanted), dtype=np.uint8).reshape(len(wanted), -1)
    return (column == expected).all(axis=1)
