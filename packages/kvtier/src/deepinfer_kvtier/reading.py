"""Verified reads: contiguous slots in one system call, nothing believed before its checksum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.host import checksum_of
from deepinfer_kvtier.io import IOV_MAX, IoEngine, read_fully
from deepinfer_kvtier.records import Status

_MAX_RUN_BYTES = 32 << 20
_CACHED_BYTES = 512 << 10  # stays in the second-level cache of one core until it is hashed
_SHARED_BYTES = 2 << 20  # stays in the last-level cache that two cores share


class Wanted:
    """One record to read: its full digest and where its bytes go.

    After a read with status OK, the fields below `nbytes` say what the record's trailer said.
    seal: what opens an encrypted record; empty for one in the clear.
    """

    __slots__ = (
        "approximate",
        "checksum",
        "depth",
        "digest",
        "generation",
        "nbytes",
        "parent",
        "seal",
        "slot_bytes",
        "views",
    )

    def __init__(
        self, digest: bytes, views: Sequence[memoryview], nbytes: int | None = None
    ) -> None:
        self.digest = digest
        self.views = views
        self.nbytes = sum([view.nbytes for view in views]) if nbytes is None else nbytes
        self.slot_bytes = fmt.slot_bytes(self.nbytes)
        self.parent = b""
        self.depth = 0
        self.checksum = b""
        self.approximate = False
        self.generation = 0
        self.seal = b""


@dataclass(slots=True)
class Run:
    """Slots that lie next to each other in one segment; `members` index the wanted records."""

    segment: int
    page: int
    members: list[int]


@dataclass(slots=True)
class Outcome:
    """Status for each record of a run, and what to count."""

    statuses: list[Status]
    counts: Counter[str] = field(default_factory=lambda: Counter[str]())

    def add(self, other: Outcome) -> None:
        """Append what another part of the run found."""
        self.statuses.extend(other.statuses)
        self.counts.update(other.counts)


def plan_runs(rows: NDArray[Any], wanted: Sequence[Wanted]) -> list[Run]:
    """Group the rows that exist and have the expected length into runs, in reading order.

    The records of a run have one length and lie next to each other.
    """
    expected = np.fromiter((want.nbytes for want in wanted), dtype=np.uint32, count=len(wanted))
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
) -> Outcome:
    """Read slots that lie next to each other and verify each one. raises: OSError.

    All records have one length. The run is read in pieces that fit the processor's cache, so that
    the checksum finds the bytes there.
    pool: threads that verify one piece while the next one is read.
    """
    size, slot = members[0].nbytes, members[0].slot_bytes
    vectors = max([len(want.views) for want in members]) + 1
    limit = _CACHED_BYTES if pool is None else _SHARED_BYTES
    step = max(1, min(limit // slot, IOV_MAX // vectors))
    if step >= len(members):
        pool = None
    checks: list[Future[Outcome]] = []
    outcome = Outcome([])
    try:
        for start in range(0, len(members), step):
            piece = members[start : start + step]
            tails = bytearray((slot - size) * len(piece))
            got = _read_piece(io, fd, offset + start * slot, piece, tails)
            # The bytes behind a short read are whatever the buffer held before.
            arguments = (piece[: got // slot], tails, kind, shard)
            if pool is None:
                outcome.add(_verify(*arguments))
            else:
                checks.append(pool.submit(_verify, *arguments))
            if got < slot * len(piece):
                break
    finally:
        for check in checks:
            outcome.add(check.result())
    missing = len(members) - len(outcome.statuses)
    if missing:
        outcome.counts["short_reads"] += missing
        outcome.statuses.extend([Status.MISS] * missing)
    return outcome


def _read_piece(
    io: IoEngine, fd: int, offset: int, piece: Sequence[Wanted], tails: bytearray
) -> int:
    """One preadv into the destinations and, for what lies between them, into `tails`."""
    room = memoryview(tails)
    step = len(tails) // len(piece)
    buffers: list[memoryview] = []
    for start, want in enumerate(piece):
        buffers += want.views
        buffers.append(room[start * step : (start + 1) * step])
    if 0 in [buffer.nbytes for buffer in buffers]:
        buffers = [buffer for buffer in buffers if buffer.nbytes]
    return read_fully(io, fd, buffers, offset, piece[0].slot_bytes * len(piece))


def _verify(members: Sequence[Wanted], tails: bytearray, kind: int, shard: int) -> Outcome:
    """Compare trailer, identity and checksum of each record; needs no lock."""
    outcome = Outcome([])
    if not members:
        return outcome
    size = members[0].nbytes
    step, at = members[0].slot_bytes - size, fmt.trailer_offset(size) - size
    for want in members:
        outcome.statuses.append(_check(want, tails, at, kind, shard))
        at += step
    good = outcome.statuses.count(Status.OK)
    outcome.counts["read_records"] = good
    outcome.counts["read_bytes"] = good * size
    if good < len(members):
        outcome.counts["corrupt"] = outcome.statuses.count(Status.CORRUPT)
        outcome.counts["digest_mismatch"] = outcome.statuses.count(Status.MISS)
    return outcome


def _check(want: Wanted, tails: bytearray, at: int, kind: int, shard: int) -> Status:
    trailer = fmt.read_trailer(tails, at)
    if trailer is None:
        return Status.CORRUPT
    flags, digest, parent, depth, checksum, generation, *identity = trailer
    if digest != want.digest or identity != [kind, shard, want.nbytes]:
        return Status.MISS
    if checksum_of(want.views) != checksum:
        return Status.CORRUPT
    want.parent = parent
    want.depth = depth
    want.checksum = checksum
    want.approximate = bool(flags & fmt.FLAG_APPROXIMATE)
    want.generation = generation
    if flags & fmt.FLAG_SEALED:
        want.seal = fmt.extra_of(tails, at)
    return Status.OK
