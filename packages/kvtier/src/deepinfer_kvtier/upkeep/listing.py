"""What lies in a directory, segment by segment."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from deepinfer_kvtier.store.directory import DirectoryTier


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


def list_segments(directory: DirectoryTier) -> list[SegmentListing]:
    """Every segment of the directory, by class, bucket and writer. raises: OSError."""
    directory.refresh()
    for name in directory.io.listdir(directory.root / "w"):
        if len(name) == 32:
            directory.segments.discover(bytes.fromhex(name))
    rows = directory.index.rows()
    listed: list[SegmentListing] = []
    for segment in directory.segments.all():
        members = rows[rows["segment"] == segment.local]
        size = 0
        with contextlib.suppress(FileNotFoundError):
            size = directory.io.disk_bytes(segment.path)
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
