"""Deletion of segments in two steps: a tombstone in the log, then, after a grace, the file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.io import is_full
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.store.segments import Segment
from deepinfer_kvtier.upkeep.survey import SegmentState


@dataclass(frozen=True, slots=True)
class Deleted:
    """Segments (numbers in this process), records and bytes that are gone or promised to go."""

    segments: frozenset[int]
    records: int
    bytes: int

    def __add__(self, other: Deleted) -> Deleted:
        return Deleted(
            self.segments | other.segments, self.records + other.records, self.bytes + other.bytes
        )


def delete_segments(
    directory: DirectoryTier, states: Iterable[SegmentState], dry_run: bool
) -> Deleted:
    """Tombstone, forget, unlink; what any process reads or has leased stays. raises: OSError."""
    states = list(states)
    if dry_run:
        return Deleted(
            frozenset(state.local for state in states),
            sum(state.records for state in states),
            sum(state.bytes for state in states),
        )
    growing = {state.local for state in states if state.growing}
    _seal(directory, growing)
    deleted = Deleted(frozenset(), 0, 0)
    late: list[NDArray[Any]] = []
    for state in states:
        segment = directory.segments.get(state.local)
        if directory.is_growing(segment):
            continue  # it could not be sealed
        if state.local in growing and _records_in(directory, segment) > state.records:
            continue  # it grew between the survey and its sealing: what is new stays
        with directory.segments.claimed(segment) as free:
            if free:
                _delete(directory, segment, late)
                deleted += Deleted(frozenset((state.local,)), state.records, state.bytes)
    for tombstone in late:
        directory.queue_control(tombstone)
    if late:
        log_what_waits(directory)
    return deleted


def _delete(directory: DirectoryTier, segment: Segment, late: list[NDArray[Any]]) -> None:
    """One segment that nobody uses; tombstones that find no room join `late`. raises: OSError."""
    tombstone = segment_tombstone(segment.writer, segment.number)
    try:
        directory.append_control(tombstone)
    except OSError as cause:
        if not is_full(cause):
            raise
        # Deleting is what makes room for the tombstone. Until it is written, who looks for
        # the file finds it missing, and that is a miss.
        late.append(tombstone)
    segment.buried = True
    segment.buried_at = directory.clock.monotonic()
    directory.index.forget_segment(segment)
    if late or directory.delete_grace_s <= 0:
        _unlink(directory, segment)


def log_what_waits(directory: DirectoryTier) -> None:
    """Write waiting control entries; on a full disk they go on waiting. raises: other OSErrors."""
    try:
        directory.write_control()
    except OSError as cause:
        if not is_full(cause):
            raise


def _seal(directory: DirectoryTier, growing: set[int]) -> None:
    """End segments that this process appends to; on a full disk some may go on growing."""
    if not growing:
        return
    try:
        directory.seal({directory.segments.get(local).number for local in growing})
    except OSError as cause:
        if not is_full(cause):
            raise


def emptied(directory: DirectoryTier, states: Iterable[SegmentState]) -> list[SegmentState]:
    """Those segments whose living records have all been written elsewhere."""
    return [state for state in states if directory.segments.get(state.local).moved]


def unlink_leftovers(directory: DirectoryTier) -> None:
    """Files whose deletion was promised: by a neighbour, or here, and not done yet.

    The grace runs on this process's own clock, from when it first heard of the tombstone.
    """
    now = directory.clock.monotonic()
    for segment in directory.segments.buried():
        if segment.buried_at is None:
            segment.buried_at = now
        if now - segment.buried_at >= directory.delete_grace_s:
            with directory.segments.claimed(segment) as free:
                if free:
                    _unlink(directory, segment)
    for path in directory.sharing.leftovers():
        directory.io.unlink(path)


def _unlink(directory: DirectoryTier, segment: Segment) -> None:
    directory.io.unlink(segment.path)
    segment.buried = False


def _records_in(directory: DirectoryTier, segment: Segment) -> int:
    return int((directory.index.stored_rows()["segment"] == segment.local).sum())


def segment_tombstone(writer: bytes, number: int) -> NDArray[Any]:
    """The entry that tells every process that a segment is deleted."""
    entry = np.zeros(1, dtype=fmt.ENTRY)
    entry["key_lo"] = int.from_bytes(writer[:8], "little")
    entry["key_hi"] = int.from_bytes(writer[8:], "little")
    entry["segment"] = number
    entry["flags"] = fmt.FLAG_TOMB_SEGMENT
    return entry
