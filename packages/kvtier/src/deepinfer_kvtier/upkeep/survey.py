"""What lies in a directory, seen the way collection needs it: by segment, with ages and sizes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.store.segments import parse_segment_name


@dataclass(frozen=True, slots=True)
class SegmentState:
    """What decides over a segment.

    bytes:         what its file occupies.
    records:       those the index knows, further copies of a record included.
    alive_bytes:   slots of the records whose lifetime is not over.
    last_seen_s:   newest use of any of its records; 0 when it has none left.
    youngest_floor: whether that is below the age at which an eviction counts as early.
    deletable:     no other process appends to it; one that grows here is sealed first.
    growing:       this process appends to it.
    """

    local: int
    cls: str
    bytes: int
    records: int
    alive_bytes: int
    last_seen_s: int
    youngest_floor: bool
    deletable: bool
    growing: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """All segments, and the bytes of everything that is not promised to be deleted."""

    total_bytes: int
    states: list[SegmentState]

    def bytes_of(self, cls: str) -> int:
        """Bytes of the segments of one class."""
        return sum(state.bytes for state in self.states if state.cls == cls)


def take_survey(directory: DirectoryTier) -> Survey:
    """raises: OSError."""
    config = directory.config
    now = directory.clock.wall()
    # Files before rows: a segment may gain records meanwhile, but never seem to have lost them.
    total, sizes = (0, Counter[int]()) if directory.sharing.shared else _sizes(directory)
    by_segment = rows_by_segment(directory.index.stored_rows())
    if directory.sharing.shared:
        total, sizes = _indexed_sizes(directory, by_segment)
    logs = directory.logs()
    states: list[SegmentState] = []
    for segment in directory.segments.all():
        if segment.buried:
            continue  # its file waits for the end of its grace
        members = by_segment.get(segment.local)
        seen = int(members["seen_s"].max()) if members is not None else 0
        writer_name = segment.writer.hex()
        ended = writer_name in logs and logs[writer_name].ended
        mine = writer_name == directory.writer_name
        growing = directory.is_growing(segment)
        finished = not (growing and members is None) and (segment.sealed or ended or mine)
        states.append(
            SegmentState(
                local=segment.local,
                cls=segment.cls,
                bytes=sizes[segment.local],
                records=0 if members is None else len(members),
                alive_bytes=0 if members is None else _alive_bytes(directory, segment.cls, members),
                last_seen_s=seen,
                youngest_floor=now - seen < config.floor_s,
                deletable=finished and not directory.segments.is_leased(segment),
                growing=growing,
            )
        )
    return Survey(total, states)


def alive_rows(directory: DirectoryTier, cls: str, rows: NDArray[Any]) -> NDArray[Any]:
    """The rows of one class whose lifetime is not over."""
    policy = directory.config.classes.get(cls)
    if policy is None or policy.ttl_s is None:
        return rows
    return rows[directory.clock.wall() - rows["seen_s"].astype(np.float64) < policy.ttl_s]


def rows_by_segment(rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Rows grouped by the number of their segment in this process."""
    if not len(rows):
        return {}
    ordered = rows[np.argsort(rows["segment"], kind="stable")]
    numbers, starts = np.unique(ordered["segment"], return_index=True)
    return {
        int(number): part
        for number, part in zip(numbers, np.split(ordered, starts[1:]), strict=True)
    }


def writer_folders(directory: DirectoryTier) -> Iterator[str]:
    """Names of all writers' folders. raises: OSError."""
    for name in directory.io.listdir(directory.root / "w"):
        if len(name) == 32:
            yield name


def _alive_bytes(directory: DirectoryTier, cls: str, rows: NDArray[Any]) -> int:
    lengths, counts = np.unique(alive_rows(directory, cls, rows)["length"], return_counts=True)
    return sum(
        fmt.slot_bytes(int(n)) * int(count) for n, count in zip(lengths, counts, strict=True)
    )


def _indexed_sizes(
    directory: DirectoryTier, by_segment: dict[int, NDArray[Any]]
) -> tuple[int, Counter[int]]:
    """`_sizes` from the index alone: what a mounted file system says of sizes may be old."""
    sizes = Counter[int]()
    for local, rows in by_segment.items():
        lengths, counts = np.unique(rows["length"], return_counts=True)
        slots = zip(lengths, counts, strict=True)
        sizes[local] = fmt.PAGE + sum(fmt.slot_bytes(int(n)) * int(count) for n, count in slots)
    frames = sum(log.frames for log in directory.logs().values())
    return sizes.total() + frames * fmt.PAGE, sizes


def _sizes(directory: DirectoryTier) -> tuple[int, Counter[int]]:
    """Bytes of everything under the root but buried segments, and of each segment by number."""
    total = 0
    sizes: Counter[int] = Counter()
    for name in writer_folders(directory):
        writer = bytes.fromhex(name)
        directory.segments.discover(writer)
        folder = directory.root / "w" / name
        with contextlib.suppress(FileNotFoundError):
            for file in directory.io.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    size = directory.io.disk_bytes(folder / file)
                    parsed = parse_segment_name(file)
                    segment = directory.segments.named(writer, parsed[2]) if parsed else None
                    if segment is None or not segment.buried:
                        total += size
                    if segment is not None:
                        sizes[segment.local] = size
    return total, sizes
