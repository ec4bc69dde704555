"""Reads of compressed records: their slots differ in length, and their bytes go by way of a buffer.

A record is compressed where its stored length is below that of its layout; only such records are
looked at here, so reads of others pay nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.coding import codec
from deepinfer_kvtier.coding.compression import expand, warn_missing
from deepinfer_kvtier.io import IoEngine, read_fully
from deepinfer_kvtier.loads.helping import taken, with_helpers
from deepinfer_kvtier.loads.turns import ALONE, Turn
from deepinfer_kvtier.memory.host import checksum_of
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
    pool: Executor | None = None,
    helpers: int = 0,
    turn: Turn = ALONE,
) -> Outcome:
    """Read slots that lie next to each other, verify each one, and expand it. raises: OSError.

    lengths: stored bytes of each record.
    pool:    up to `helpers` of its threads take records from the same list.
    turn:    more urgent reads pass between two records.
    """
    slots = [fmt.slot_bytes(length) for length in lengths]
    room: NDArray[np.uint8] = np.empty(sum(slots), dtype=np.uint8)
    got = read_fully(io, fd, [room.data], offset, room.nbytes)
    starts = [0, *np.cumsum(slots).tolist()]
    statuses = [Status.MISS] * len(members)
    whole = sum(end <= got for end in starts[1:])
    left = deque(range(whole))
    counts: Counter[str] = Counter(short_reads=len(members) - whole)

    def work(helping: bool) -> Counter[str]:
        mine: Counter[str] = Counter()
        for i in taken(left, turn, helping=helping):
            slot = room[starts[i] : starts[i + 1]].data
            trailer = slot[fmt.trailer_offset(lengths[i]) :][: fmt.TRAILER_BYTES]
            statuses[i] = open_compressed(
                slot[: lengths[i]], fmt.parse_trailer(trailer), members[i], kind, shard, mine
            )
        return mine

    for noticed in with_helpers(work, pool, min(helpers, whole - 1)):
        counts.update(noticed)
    return Outcome(statuses, counts)


def open_compressed(
    stored: memoryview,
    trailer: fmt.Trailer | None,
    want: Wanted,
    kind: int,
    shard: int,
    counts: Counter[str],
) -> Status:
    """Verify one compressed record and expand it, or leave it in `want.packed` for its key.

    returns: SKIPPED for a good record that this process cannot expand.
    """
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
    if not codec.installed():
        counts["codec_missing"] += 1
        warn_missing('pip install "deepinfer-kvtier[zstd]"')
        return Status.SKIPPED
    want.parent = trailer.parent
    want.depth = trailer.depth
    want.approximate = bool(trailer.flags & fmt.FLAG_APPROXIMATE)
    want.generation = trailer.generation
    if trailer.flags & fmt.FLAG_SEALED:
        want.seal = trailer.extra
        want.packed = memoryview(bytearray(stored))
        status = Status.OK
    else:
        status = expand_into(want, stored, counts)
    if status is Status.OK:
        counts["read_records"] += 1
        counts["read_bytes"] += want.nbytes
    return status


def expand_into(want: Wanted, stored: memoryview, counts: Counter[str]) -> Status:
    """Expand verified bytes in the clear into their destination, and sum what arrived there."""
    started = time.perf_counter()
    status = expand(stored, want.views)
    if status is Status.OK:
        want.checksum = checksum_of(want.views)
        counts["expanded_records"] += 1
        counts["expanded_bytes"] += want.nbytes
        counts["expand_us"] += int((time.perf_counter() - started) * 1e6)
    else:
        counts["corrupt" if status is Status.CORRUPT else "codec_missing"] += 1
    return status
