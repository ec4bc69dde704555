"""Second chance: what was used since it was written outlives the segment that a quota evicts.

Segments leave as a whole, oldest first, and take with them what is asked for all the time. So the
records of a victim that were hit since they were written are written again, up to half of the
segment, heads of chains first; the copy has to earn its next chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.io import is_full
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.upkeep.moving import COPY_SHARE, copy_records
from deepinfer_kvtier.upkeep.survey import SegmentState, alive_rows, rows_by_segment

KEPT_SHARE: Final = 0.5
"""Of a segment's bytes, at most: an eviction must free something."""


def worth_keeping(
    directory: DirectoryTier, states: Iterable[SegmentState]
) -> dict[int, NDArray[Any]]:
    """Rows that deserve a second chance if their segment goes, by its number here."""
    used = rows_by_segment(directory.index.hit_rows())
    kept: dict[int, NDArray[Any]] = {}
    for state in states:
        if state.growing or state.local not in used:
            continue  # copies of what is in a growing segment would go to that very segment
        rows = alive_rows(directory, state.cls, used[state.local])
        rows = rows[np.argsort(rows["depth"], kind="stable")]
        rows = rows[np.cumsum(_slot_bytes(rows)) <= KEPT_SHARE * state.bytes]
        if len(rows):
            kept[state.local] = rows
    return kept


def bytes_of(kept: Mapping[int, NDArray[Any]]) -> dict[int, int]:
    """Bytes of the slots of these rows, by segment."""
    return {local: int(_slot_bytes(rows).sum()) for local, rows in kept.items()}


@dataclass(frozen=True, slots=True)
class Kept:
    """Records that were written again, or would be: how many by segment, and their slots' bytes."""

    records: dict[int, int] = field(default_factory=dict[int, int])
    bytes: int = 0


def write_again(
    directory: DirectoryTier,
    victims: Iterable[SegmentState],
    kept: Mapping[int, NDArray[Any]],
    dry_run: bool,
) -> Kept:
    """Copy what is worth keeping of the victims, in at most a share of the time.

    raises: OSError, except for a full disk.
    """
    deadline = directory.clock.monotonic() + COPY_SHARE * directory.since_collected_s()
    records: dict[int, int] = {}
    copied = 0
    for state in victims:
        rows = kept.get(state.local)
        if rows is None or directory.clock.monotonic() >= deadline:
            continue
        if dry_run:
            records[state.local] = len(rows)
            copied += int(_slot_bytes(rows).sum())
            continue
        try:
            for record in copy_records(directory, directory, rows, state.cls):
                records[state.local] = records.get(state.local, 0) + 1
                copied += fmt.slot_bytes(record.nbytes)
                directory.counts["gc_copied_payload_bytes"] += record.nbytes
        except OSError as cause:
            if not is_full(cause):
                raise
            break
        # Where its segment cannot go yet, it is not copied once more.
        directory.index.forget_hits(rows)
    return Kept(records, copied)


def _slot_bytes(rows: NDArray[Any]) -> NDArray[np.int64]:
    lengths, which = np.unique(rows["length"], return_inverse=True)
    sizes = np.array([fmt.slot_bytes(int(length)) for length in lengths], dtype=np.int64)
    return sizes[which]
