"""Evictions of one collection: victims are chosen, what is worth it is written again, they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.upkeep.deleting import Deleted, delete_segments
from deepinfer_kvtier.upkeep.sparing import bytes_of, write_again
from deepinfer_kvtier.upkeep.survey import SegmentState


@dataclass(frozen=True, slots=True)
class Evicted:
    """What evictions did, or would do.

    kept_records, kept_bytes: written again, of all victims.
    lost_records, early_records: gone for good; of those, younger than the floor.
    """

    deleted: Deleted
    kept_records: int
    kept_bytes: int
    lost_records: int
    early_records: int

    def __add__(self, other: Evicted) -> Evicted:
        return Evicted(
            self.deleted + other.deleted,
            self.kept_records + other.kept_records,
            self.kept_bytes + other.kept_bytes,
            self.lost_records + other.lost_records,
            self.early_records + other.early_records,
        )


def evict(
    directory: DirectoryTier,
    choose: Callable[[Mapping[int, int]], Sequence[SegmentState]],
    worth: Mapping[int, NDArray[Any]],
    dry_run: bool,
) -> Evicted:
    """Evict the segments that `choose` names when told what is written again of each, in bytes.

    worth: rows that deserve a second chance, by segment. raises: OSError.
    """
    victims = choose(bytes_of(worth))
    if worth and any(state.growing for state in victims):
        # Copies would go to the very segment that has to leave.
        worth = {}
        victims = choose({})
    kept = write_again(directory, victims, worth, dry_run)
    deleted = delete_segments(directory, victims, dry_run)
    gone = [state for state in victims if state.local in deleted.segments]
    lost = {state.local: state.records - kept.records.get(state.local, 0) for state in gone}
    return Evicted(
        deleted,
        kept_records=sum(kept.records.values()),
        kept_bytes=kept.bytes,
        lost_records=sum(lost.values()),
        early_records=sum(lost[state.local] for state in gone if state.youngest_floor),
    )
