"""Deletion of segments in two steps: a tombstone in the log, then, after a grace, the file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.directory import DirectoryTier
from deepinfer_kvtier.segments import Segment
from deepinfer_kvtier.survey import SegmentState


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
    """Tombstone, forget, unlink. Who reads now keeps its descriptor. raises: OSError."""
    states = list(states)
    if dry_run:
        return Deleted(
            frozenset(state.local for state in states),
            sum(state.records for state in states),
            sum(state.bytes for state in states),
        )
    growing = {state.local for state in states if state.growing}
    if growing:
        directory.seal({directory.segments.get(local).number for local in growing})
    deleted = Deleted(frozenset(), 0, 0)
    for state in states:
        segment = directory.segments.get(state.local)
        if state.local in growing and _records_in(directory, segment) > state.records:
            continue  # it grew between the survey and its sealing: what is new stays
        directory.append_control(_segment_tombstone(segment))
        segment.buried = True
        segment.buried_at = directory.clock.monotonic()
        directory.index.forget_segment(segment)
        if directory.delete_grace_s <= 0:
            _unlink(directory, segment)
        deleted += Deleted(frozenset((state.local,)), state.records, state.bytes)
    return deleted


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
            _unlink(directory, segment)
    for path in directory.sharing.leftovers():
        directory.io.unlink(path)


def _unlink(directory: DirectoryTier, segment: Segment) -> None:
    directory.io.unlink(segment.path)
    segment.buried = False


def _records_in(directory: DirectoryTier, segment: Segment) -> int:
    return int((directory.index.stored_rows()["segment"] == segment.local).sum())


def _segment_tombstone(segment: Segment) -> NDArray[Any]:
    entry = np.zeros(1, dtype=fmt.ENTRY)
    entry["key_lo"] = int.from_bytes(segment.writer[:8], "little")
    entry["key_hi"] = int.from_bytes(segment.writer[8:], "little")
    entry["segment"] = segment.number
    entry["flags"] = fmt.FLAG_TOMB_SEGMENT
    return entry
