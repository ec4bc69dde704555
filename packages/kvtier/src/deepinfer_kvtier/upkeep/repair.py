"""Finding and repairing everything a directory can have wrong, without evicting anything."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.store.snapshots import damaged_snapshots
from deepinfer_kvtier.upkeep.deleting import delete_segments
from deepinfer_kvtier.upkeep.gc import remove_empty_folders, tidy
from deepinfer_kvtier.upkeep.lost import bury_lost, find_lost
from deepinfer_kvtier.upkeep.moving import copy_records
from deepinfer_kvtier.upkeep.survey import rows_by_segment, take_survey
from deepinfer_kvtier.upkeep.verify import VerifyReport, verify


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


def check(directory: DirectoryTier, *, repair: bool) -> CheckReport:
    """Read every record and every log. raises: OSError where the directory itself fails."""
    directory.refresh()
    adopted = tidy(directory) if repair else 0
    lost = find_lost(directory)
    if repair:
        bury_lost(directory, lost)
    records = verify(directory, repair=repair)
    bad_frames = sum(log.bad_frames for log in directory.logs().values())
    bad_snapshots = [
        path
        for log in directory.logs().values()
        for path in damaged_snapshots(log.folder, directory.store, log.writer, directory.io)
    ]
    rewritten = _rewrite_damaged_logs(directory) if repair else 0
    if repair:
        for path in bad_snapshots:
            directory.io.unlink(path)
    return CheckReport(
        records=records,
        lost_segments=len(lost),
        lost_records=sum(item.records for item in lost),
        bad_index_frames=bad_frames,
        bad_snapshots=len(bad_snapshots),
        unfinished_logs=sum(not log.ended for log in directory.logs().values()),
        adopted_writers=adopted,
        rewritten_logs=rewritten,
    )


def _rewrite_damaged_logs(directory: DirectoryTier) -> int:
    """Write the records of damaged, ended logs again; the folders go, tombstones are kept."""
    damaged = {
        name
        for name, log in directory.logs().items()
        if (log.bad_frames or log.rescans) and log.ended
    }
    if not damaged:
        return 0
    rows = rows_by_segment(directory.index.stored_rows())
    states = [
        state
        for state in take_survey(directory).states
        if directory.segments.get(state.local).writer.hex() in damaged
    ]
    for state in states:
        if state.local in rows:
            for _ in copy_records(directory, directory, rows[state.local], state.cls):
                pass
    delete_segments(directory, states, dry_run=False)
    remove_empty_folders(directory)
    return len(damaged)
