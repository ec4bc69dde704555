"""Reads of records whose stored bytes are fewer than those that were put.

Their slots differ in length, and their bytes go by way of a buffer: `Wanted.packed` holds what was
stored, verified, for who knows the codec. Only records that are shorter than their layout says are
looked at here, so reads of others pay nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.io import IoEngine, read_fully
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.reading import Outcome, Run, Wanted

_MAX_RUN_BYTES: Final = 8 << 20


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
            most = np.searchsorted(np.cumsum(slots[at:end]), _MAX_RUN_BYTES, side="right")
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
