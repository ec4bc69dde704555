"""Verified reads: contiguous slots in one system call, nothing believed before its checksum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.host import checksum_of
from deepinfer_kvtier.io import IoEngine
from deepinfer_kvtier.records import Status

_IOV_MAX = 1024
_MAX_RUN_BYTES = 32 << 20


@dataclass(slots=True, eq=False)
class Wanted:
    """One record to read: its full digest and where its bytes go.

    After a read with status OK, the fields below `views` say what the record's trailer said.
    """

    digest: bytes
    views: Sequence[memoryview]
    parent: bytes = b""
    depth: int = 0
    checksum: bytes = b""
    approximate: bool = False
    generation: int = 0
    nbytes: int = field(init=False)
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum([view.nbytes for view in self.views])
        self.slot_bytes = fmt.slot_bytes(self.nbytes)


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


def plan_runs(rows: NDArray[Any], wanted: Sequence[Wanted]) -> list[Run]:
    """Group the rows that exist and have the expected length into runs, in reading order."""
    lengths, segments, pages = (rows[name].tolist() for name in ("length", "segment", "page"))
    there = [i for i, want in enumerate(wanted) if lengths[i] == want.nbytes]
    there.sort(key=lambda i: (segments[i], pages[i]))
    runs: list[Run] = []
    next_page = iov = size = 0
    for i in there:
        segment, page, slot = segments[i], pages[i], wanted[i].slot_bytes
        vectors = len(wanted[i].views) + 1
        joins = (
            runs
            and runs[-1].segment == segment
            and page == next_page
            and iov + vectors <= _IOV_MAX
            and size + slot <= _MAX_RUN_BYTES
        )
        if joins:
            runs[-1].members.append(i)
            iov, size = iov + vectors, size + slot
        else:
            runs.append(Run(segment, page, [i]))
            iov, size = vectors, slot
        next_page = page + slot // fmt.PAGE
    return runs


def read_run(
    io: IoEngine, fd: int, offset: int, kind: int, shard: int, members: Sequence[Wanted]
) -> Outcome:
    """Read slots that lie next to each other and verify each one. raises: OSError."""
    tails = [bytearray(want.slot_bytes - want.nbytes) for want in members]
    buffers: list[memoryview] = []
    for want, tail in zip(members, tails, strict=True):
        buffers.extend(view for view in want.views if view.nbytes)
        buffers.append(memoryview(tail))
    got = _read_fully(io, fd, buffers, offset)
    outcome = Outcome([])
    for want, tail in zip(members, tails, strict=True):
        size = want.slot_bytes
        if got < size:
            # The bytes behind a short read are whatever the buffer held before.
            status, got = Status.MISS, 0
            outcome.counts["short_reads"] += 1
        else:
            got -= size
            status = _verify(want, tail, kind, shard, outcome.counts)
        outcome.statuses.append(status)
    return outcome


def _verify(want: Wanted, tail: bytearray, kind: int, shard: int, counts: Counter[str]) -> Status:
    pad = fmt.trailer_offset(want.nbytes) - want.nbytes
    trailer = fmt.parse_trailer(memoryview(tail)[pad : pad + fmt.TRAILER_BYTES])
    if trailer is None:
        counts["corrupt"] += 1
        return Status.CORRUPT
    expected = (want.digest, kind, shard, want.nbytes)
    if (trailer.digest, trailer.kind, trailer.shard, trailer.payload_bytes) != expected:
        counts["digest_mismatch"] += 1
        return Status.MISS
    if checksum_of(want.views) != trailer.checksum:
        counts["corrupt"] += 1
        return Status.CORRUPT
    want.parent = trailer.parent
    want.depth = trailer.depth
    want.checksum = trailer.checksum
    want.approximate = bool(trailer.flags & fmt.FLAG_APPROXIMATE)
    want.generation = trailer.generation
    counts["read_records"] += 1
    counts["read_bytes"] += want.nbytes
    return Status.OK


def _read_fully(io: IoEngine, fd: int, buffers: list[memoryview], offset: int) -> int:
    """preadv until the buffers are full or the file ends; returns the bytes read."""
    total = 0
    left = list(buffers)
    while left:
        got = io.preadv(fd, left, offset + total)
        if got <= 0:
            break
        total += got
        while left and got >= left[0].nbytes:
            got -= left.pop(0).nbytes
        if got:
            left[0] = left[0][got:]
    return total
