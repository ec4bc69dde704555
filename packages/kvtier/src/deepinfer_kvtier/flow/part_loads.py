"""Loads that bring the first parts of all blocks before the next ones.

From host memory any range can be copied. From the directory a part can be read alone when its
record carries sums of its parts (`KVTierConfig.part_sums`); other records come whole, with the
first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import Records
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.flow.handles import Arrivals, Stage
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.reading import Wanted


def copy_stages(
    host: HostTier, records: Sequence[HostRecord | None], dst: Records, arrivals: Arrivals
) -> list[int]:
    """Copy what lies in host memory, stage by stage; returns which blocks that were.

    records: pinned, None for a block that is not in memory.
    """
    found = [
        (i, record)
        for i, record in enumerate(records)
        if record is not None and record.data.nbytes == dst.payload
    ]
    damaged = host.damaged([record for _, record in found])
    for record in damaged:
        host.remove(record.kind, record.digest, damaged=True)
    found = [(i, record) for i, record in found if record not in damaged]
    which = [i for i, _ in found]
    for stage in arrivals.stages:
        for i, record in found:
            for offset, size in stage.ranges:
                _copy_range(record.data[offset : offset + size], dst, i, offset)
        arrivals.arrive(stage, which)
    return which


def _copy_range(source: NDArray[np.uint8], dst: Records, i: int, offset: int) -> None:
    for view in dst.part_views(i, offset, len(source)):
        view[:] = source[: view.nbytes].data
        source = source[view.nbytes :]


def read_stages(
    disk: DiskTier,
    kind: int,
    shard: int,
    wanted: Sequence[Wanted],
    which: Sequence[int],
    dst: Records,
    arrivals: Arrivals,
    in_time: Callable[[], bool],
) -> dict[int, Status]:
    """Read records that carry part sums, stage by stage.

    which:   position of each wanted record in the load.
    returns: status by position, without those that must be read whole.
    """
    statuses: dict[int, Status] = {}
    places: dict[int, tuple[int, int, tuple[int, ...], Wanted]] = {}
    rows = disk.index.probe(kind, shard, [want.digest for want in wanted])
    held: list[int] = []
    try:
        for i, want, row in zip(which, wanted, rows, strict=True):
            if int(row["length"]) != want.nbytes or disk.breaker.is_open:
                continue
            local, start = int(row["segment"]), int(row["page"]) * fmt.PAGE
            fd = disk.segments.acquire(local)
            if fd is None:
                continue
            held.append(local)
            sums = _part_sums(disk, fd, start, want, kind, shard)
            if sums is not None and len(arrivals.parts) <= len(sums):
                places[i] = fd, start, sums, want
        for stage in arrivals.stages:
            for i in list(places):
                fd, start, sums, _ = places[i]
                if not in_time():
                    statuses[i] = Status.TIMEOUT
                elif not _read_stage(disk, fd, start, i, dst, stage, arrivals, sums):
                    statuses[i] = Status.CORRUPT
                if i in statuses:
                    del places[i]
            arrivals.arrive(stage, list(places))
    except OSError:
        disk.counts["read_errors"] += 1
        disk.breaker.error()
        return {}
    finally:
        for local in held:
            disk.segments.release(local)
    for i, (_, _, _, want) in places.items():
        statuses[i] = Status.OK
        disk.counts["read_records"] += 1
        disk.counts["read_bytes"] += want.nbytes
    for i, want, row in zip(which, wanted, rows, strict=True):
        if statuses.get(i) is Status.CORRUPT:
            disk.counts["corrupt"] += 1
            disk.quarantine(kind, shard, want.digest, int(row["segment"]))
    return statuses


def _part_sums(
    disk: DiskTier, fd: int, start: int, want: Wanted, kind: int, shard: int
) -> tuple[int, ...] | None:
    """Sums of the parts in the record's trailer; None without them, or when it is another's."""
    tail = bytearray(fmt.TRAILER_BYTES)
    at = start + fmt.trailer_offset(want.nbytes)
    if disk.io.preadv(fd, [tail], at) < len(tail):
        return None
    trailer = fmt.parse_trailer(tail)
    if trailer is None or trailer.flags & fmt.FLAG_SEALED or trailer.digest != want.digest:
        return None
    if (trailer.kind, trailer.shard, trailer.payload_bytes) != (kind, shard, want.nbytes):
        return None
    sums = fmt.part_sums(trailer.extra)
    if not any(sums):
        return None
    want.parent, want.depth, want.checksum = trailer.parent, trailer.depth, trailer.checksum
    want.approximate = bool(trailer.flags & fmt.FLAG_APPROXIMATE)
    want.generation = trailer.generation
    return sums


def _read_stage(
    disk: DiskTier,
    fd: int,
    start: int,
    i: int,
    dst: Records,
    stage: Stage,
    arrivals: Arrivals,
    sums: Sequence[int],
) -> bool:
    """Bring the parts of one stage of one record; False when any is not what was stored."""
    for offset, size in stage.ranges:
        views = dst.part_views(i, offset, size)
        if size and disk.io.preadv(fd, views, start + offset) < size:
            return False
    for number in stage.parts:
        part = arrivals.parts[number]
        hasher = xxhash.xxh3_64()
        for view in dst.part_views(i, part.offset, part.size):
            hasher.update(view)
        if hasher.intdigest() != sums[number]:
            return False
    return True
