"""What lies in a folder, segment by segment; and bringing it back into the page cache."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.compaction import read_slot
from deepinfer_kvtier.log.disk import DiskTier


@dataclass(frozen=True, slots=True)
class SegmentListing:
    """One segment file; `last_used_s` is seconds since 1970, 0 when it has no record left."""

    writer: str
    number: int
    cls: str
    bucket_s: int
    records: int
    payload_bytes: int
    disk_bytes: int
    last_used_s: int


def list_segments(disk: DiskTier) -> list[SegmentListing]:
    """Every segment of the directory, by class, bucket and writer. raises: OSError."""
    disk.refresh()
    for name in disk.io.listdir(disk.root / "w"):
        if len(name) == 32:
            disk.segments.discover(bytes.fromhex(name))
    rows = disk.index.rows()
    listed: list[SegmentListing] = []
    for segment in disk.segments.all():
        members = rows[rows["segment"] == segment.local]
        size = 0
        with contextlib.suppress(FileNotFoundError):
            size = disk.io.disk_bytes(segment.path)
        listed.append(
            SegmentListing(
                writer=segment.writer.hex(),
                number=segment.number,
                cls=segment.cls,
                bucket_s=segment.bucket,
                records=len(members),
                payload_bytes=int(members["length"].sum()),
                disk_bytes=size,
                last_used_s=int(members["seen_s"].max()) if len(members) else 0,
            )
        )
    return sorted(listed, key=lambda s: (s.cls, s.bucket_s, s.writer, s.number))


@dataclass(frozen=True, slots=True)
class WarmReport:
    """Records and slot bytes that were read; `bad` could not be, `kvtier fsck` says why."""

    records: int
    bytes: int
    bad: int


def warm_up(disk: DiskTier, limit_bytes: int) -> WarmReport:
    """Read the records used last, heads of chains first, until `limit_bytes` are read.

    raises: OSError where the directory itself cannot be read.
    """
    disk.refresh()
    rows = disk.index.rows()
    order = np.lexsort((rows["depth"], -rows["seen_s"].astype(np.int64)))
    sizes = np.cumsum([fmt.slot_bytes(int(n)) for n in rows["length"][order]])
    chosen = rows[order[: int(np.searchsorted(sizes, limit_bytes, side="right"))]]
    chosen.sort(order=["segment", "page"])
    good = total = 0
    for row in chosen:
        if not isinstance(read_slot(disk, row), str):
            good += 1
            total += fmt.slot_bytes(int(row["length"]))
    return WarmReport(good, total, len(chosen) - good)
