"""Checking stored records without any prompt: is each one what the index says it is?"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.compaction import (
    READ_ERROR,
    collect_stats,
    copy_records,
    read_slot,
    rows_by_segment,
)
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.gc import delete_segments, remove_empty_folders, tidy
from deepinfer_kvtier.log.log_reader import damaged_snapshots
from deepinfer_kvtier.ops.missing_segments import find_missing, tombstone_missing


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check found.

    bad:      records by reason.
    keys:     their 16-byte keys in hex.
    places:   where each of them lies: file under the directory, offset and bytes of its slot. The
              bytes stay there for inspection until the segment is collected.
    repaired: how many were hidden.
    """

    checked: int
    bytes: int
    bad: dict[str, int]
    keys: tuple[str, ...]
    places: tuple[str, ...]
    repaired: int


def verify(
    disk: DiskTier, *, sample: float = 1.0, seed: int = 0, repair: bool = False
) -> VerifyReport:
    """Read records back and compare trailer, key and checksum.

    sample: share of the records to read; the choice follows from `seed`.
    repair: hide bad records, so that the next request computes and stores them again.
    raises: OSError where the directory itself cannot be read.
    """
    disk.refresh()
    chooser = random.Random(seed)
    rows = disk.index.rows()
    rows.sort(order=["segment", "page"])
    bad: Counter[str] = Counter()
    broken: list[tuple[int, int, bytes]] = []
    places: list[str] = []
    checked = total = 0
    for row in rows:
        if chooser.random() >= sample:
            continue
        checked += 1
        total += int(row["length"])
        read = read_slot(disk, row)
        if isinstance(read, str):
            bad[read] += 1
            if read.startswith(READ_ERROR):
                continue  # nothing is known of it: hiding it could lose a good record
            broken.append((int(row["kind"]), int(row["shard"]), fmt.key_bytes(row)))
            places.append(_place(disk, row))
    if repair:
        for kind, shard, key in broken:
            # The index knows 16 bytes of a digest, and a tombstone needs no more.
            disk.tombstone(kind, shard, [key + bytes(16)])
        disk.write_control()
    return VerifyReport(
        checked,
        total,
        dict(bad),
        tuple(key.hex() for _, _, key in broken),
        tuple(places),
        len(broken) if repair else 0,
    )


def _place(disk: DiskTier, row: Any) -> str:
    path = disk.segments.get(int(row["segment"])).path.relative_to(disk.root)
    size = fmt.slot_bytes(int(row["length"]))
    return f"{path} offset {int(row['page']) * fmt.PAGE} bytes {size}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `fsck` found and did.

    records:          every record, read back; bad ones were hidden when repairing.
    lost_segments, lost_records: segment files that are gone without having been deleted, and the
                      records that went with them; a repair writes their tombstones.
    bad_index_frames: frames of index logs that are not what was written; their entries are lost,
                      and the next requests store those records again.
    bad_snapshots:    snapshots of logs that readers ignore; a repair removes them.
    unfinished_logs:  logs of writers that are dead, or still run.
    adopted_writers, rewritten_logs: what a repair did about them. A damaged log that has ended is
                      rewritten, with what it still knows, as part of this process's own.
    """

    records: VerifyReport
    lost_segments: int
    lost_records: int
    bad_index_frames: int
    bad_snapshots: int
    unfinished_logs: int
    adopted_writers: int
    rewritten_logs: int

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        found = (self.lost_segments, self.bad_index_frames, self.bad_snapshots)
        return not (self.records.bad or any(found))

    def facts(self) -> dict[str, object]:
        """Flat, for printing."""
        facts = dataclasses.asdict(self)
        return {**facts.pop("records"), **facts}


def check(disk: DiskTier, *, repair: bool) -> CheckReport:
    """Read every record and every log. raises: OSError where the directory itself fails."""
    disk.refresh()
    adopted = tidy(disk) if repair else 0
    lost = find_missing(disk)
    if repair:
        tombstone_missing(disk, lost)
    records = verify(disk, repair=repair)
    bad_frames = sum(log.bad_frames for log in disk.logs().values())
    bad_snapshots = [
        path
        for log in disk.logs().values()
        for path in damaged_snapshots(log.folder, disk.store, log.writer, disk.io)
    ]
    rewritten = _rewrite_damaged_logs(disk) if repair else 0
    if repair:
        for path in bad_snapshots:
            disk.io.unlink(path)
    return CheckReport(
        records=records,
        lost_segments=len(lost),
        lost_records=sum(item.records for item in lost),
        bad_index_frames=bad_frames,
        bad_snapshots=len(bad_snapshots),
        unfinished_logs=sum(not log.ended for log in disk.logs().values()),
        adopted_writers=adopted,
        rewritten_logs=rewritten,
    )


def _rewrite_damaged_logs(disk: DiskTier) -> int:
    """Write the records of damaged, ended logs again; the folders go, tombstones are kept."""
    damaged = {
        name for name, log in disk.logs().items() if (log.bad_frames or log.rescans) and log.ended
    }
    if not damaged:
        return 0
    rows = rows_by_segment(disk.index.stored_rows())
    states = [
        state
        for state in collect_stats(disk).states
        if disk.segments.get(state.local).writer.hex() in damaged
    ]
    for state in states:
        if state.local in rows:
            for _ in copy_records(disk, disk, rows[state.local], state.cls):
                pass
    delete_segments(disk, states, dry_run=False)
    remove_empty_folders(disk)
    return len(damaged)
