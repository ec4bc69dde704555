"""Which segments leave, and why: pure decisions over a survey."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.config import KVTierConfig
from deepinfer_kvtier.base.files import is_full
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.compaction import (
    COPY_SHARE,
    FolderStats,
    SegmentStats,
    UnreadableError,
    alive_rows,
    choose_expired,
    choose_sparse,
    choose_victims,
    class_ranks,
    collect_stats,
    copy_forward,
    copy_records,
    over_class_quotas,
    over_limit,
    rows_by_segment,
)
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.log_reader import LogReader
from deepinfer_kvtier.log.namespaces import enforce_namespace_quotas
from deepinfer_kvtier.log.recovery import adopt
from deepinfer_kvtier.log.segments import Segment
from deepinfer_kvtier.log.writer import remove_folder


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


def delete_segments(disk: DiskTier, states: Iterable[SegmentStats], dry_run: bool) -> Deleted:
    """Tombstone, forget, unlink; what any process reads or has leased stays. raises: OSError."""
    states = list(states)
    if dry_run:
        return Deleted(
            frozenset(state.local for state in states),
            sum(state.records for state in states),
            sum(state.bytes for state in states),
        )
    growing = {state.local for state in states if state.growing}
    _seal(disk, growing)
    deleted = Deleted(frozenset(), 0, 0)
    late: list[NDArray[Any]] = []
    for state in states:
        segment = disk.segments.get(state.local)
        if disk.is_growing(segment):
            continue  # it could not be sealed
        if state.local in growing and _records_in(disk, segment) > state.records:
            continue  # it grew between the survey and its sealing: what is new stays
        with disk.segments.claimed(segment) as free:
            if free:
                _delete(disk, segment, late)
                deleted += Deleted(frozenset((state.local,)), state.records, state.bytes)
    for tombstone in late:
        disk.queue_control(tombstone)
    if late:
        log_what_waits(disk)
    return deleted


def _delete(disk: DiskTier, segment: Segment, late: list[NDArray[Any]]) -> None:
    """One segment that nobody uses; tombstones that find no room join `late`. raises: OSError."""
    tombstone = segment_tombstone(segment.writer, segment.number)
    try:
        disk.append_control(tombstone)
    except OSError as cause:
        if not is_full(cause):
            raise
        # Deleting is what makes room for the tombstone. Until it is written, who looks for
        # the file finds it missing, and that is a miss.
        late.append(tombstone)
    segment.tombstoned = True
    segment.tombstoned_at = disk.clock.monotonic()
    disk.index.forget_segment(segment)
    if late or disk.delete_grace_s <= 0:
        _unlink(disk, segment)


def log_what_waits(disk: DiskTier) -> None:
    """Write waiting control entries; on a full disk they go on waiting. raises: other OSErrors."""
    try:
        disk.write_control()
    except OSError as cause:
        if not is_full(cause):
            raise


def _seal(disk: DiskTier, growing: set[int]) -> None:
    """End segments that this process appends to; on a full disk some may go on growing."""
    if not growing:
        return
    try:
        disk.seal({disk.segments.get(local).number for local in growing})
    except OSError as cause:
        if not is_full(cause):
            raise


def emptied(disk: DiskTier, states: Iterable[SegmentStats]) -> list[SegmentStats]:
    """Those segments whose living records have all been written elsewhere."""
    return [state for state in states if disk.segments.get(state.local).moved]


def unlink_leftovers(disk: DiskTier) -> None:
    """Files whose deletion was promised: by a neighbour, or here, and not done yet.

    The grace runs on this process's own clock, from when it first heard of the tombstone.
    """
    now = disk.clock.monotonic()
    for segment in disk.segments.tombstoned():
        if segment.tombstoned_at is None:
            segment.tombstoned_at = now
        if now - segment.tombstoned_at >= disk.delete_grace_s:
            with disk.segments.claimed(segment) as free:
                if free:
                    _unlink(disk, segment)
    for path in disk.liveness.leftovers():
        disk.io.unlink(path)


def _unlink(disk: DiskTier, segment: Segment) -> None:
    """Its space returns at once, also where some process keeps it open without using it."""
    disk.segments.empty(segment)
    disk.io.unlink(segment.path)
    segment.tombstoned = False


def _records_in(disk: DiskTier, segment: Segment) -> int:
    return int((disk.index.stored_rows()["segment"] == segment.local).sum())


def segment_tombstone(writer: bytes, number: int) -> NDArray[Any]:
    """The entry that tells every process that a segment is deleted."""
    entry = np.zeros(1, dtype=fmt.ENTRY)
    entry["key_lo"] = int.from_bytes(writer[:8], "little")
    entry["key_hi"] = int.from_bytes(writer[8:], "little")
    entry["segment"] = number
    entry["flags"] = fmt.FLAG_TOMB_SEGMENT
    return entry


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
    disk: DiskTier,
    choose: Callable[[Mapping[int, int]], Sequence[SegmentStats]],
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
    kept = write_again(disk, victims, worth, dry_run)
    deleted = delete_segments(disk, victims, dry_run)
    gone = [state for state in victims if state.local in deleted.segments]
    lost = {state.local: state.records - kept.records.get(state.local, 0) for state in gone}
    return Evicted(
        deleted,
        kept_records=sum(kept.records.values()),
        kept_bytes=kept.bytes,
        lost_records=sum(lost.values()),
        early_records=sum(lost[state.local] for state in gone if state.youngest_floor),
    )


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one collection did, or with `dry_run` would do. Sizes in bytes of the file system.

    segments_expired: segments without a living record, those that were rewritten included.
    bytes_copied:     living records that moved to new segments, second chances included.
    bytes_left:       everything in the folder, files that wait for their grace included.
    within_limits:    whether quota and free share are kept now.
    """

    segments_expired: int
    segments_evicted: int
    records_removed: int
    bytes_freed: int
    bytes_left: int
    bytes_copied: int
    evicted_before_floor: int
    adopted_writers: int
    within_limits: bool


def collect(disk: DiskTier, *, dry_run: bool = False) -> GcReport:
    """One pass: adopt, expire, rewrite what is mostly dead, enforce quotas and the free share.

    raises: OSError.
    """
    config = disk.config
    disk.refresh()
    if not disk.is_there():
        return GcReport(0, 0, 0, 0, 0, 0, 0, 0, within_limits=True)
    adopted = 0 if dry_run else tidy(disk)
    dropped = 0
    if config.namespace_quotas and not dry_run:
        dropped = enforce_namespace_quotas(disk)
    stats = collect_stats(disk)
    expired = choose_expired(stats.states, config.classes, disk.clock.wall())
    gone = delete_segments(disk, expired, dry_run)
    sparse = choose_sparse(stats.states)
    moved, copied = (0, 0) if dry_run else copy_forward(disk, sparse)
    gone += delete_segments(disk, emptied(disk, sparse), dry_run)
    living = [state for state in stats.states if state.local not in gone.segments]
    rest = FolderStats(stats.total_bytes, stats.in_grace_bytes, living)
    left = stats.total_bytes - stats.in_grace_bytes + copied - gone.bytes
    worth: Mapping[int, NDArray[Any]] = {}
    # A second chance takes room, so there is none on a file system that is short of it.
    if _over_a_quota(config, rest, left) and not _shortage(disk, gone.bytes * dry_run):
        worth = worth_keeping(disk, rest.states)
    stuck = over_class_quotas(config, rest)[1]
    evicted = evict(disk, lambda kept: over_class_quotas(config, rest, kept)[0], worth, dry_run)
    left += evicted.kept_bytes - evicted.deleted.bytes
    shortage = _shortage(disk, (gone.bytes + evicted.deleted.bytes) * dry_run)
    excess = max(over_limit(config, config.quota_bytes, left), shortage)
    states = [s for s in rest.states if s.local not in evicted.deleted.segments]
    ranks = class_ranks(config.classes)
    more = evict(disk, lambda kept: choose_victims(states, excess, ranks, kept), worth, dry_run)
    evicted += more
    freed = more.deleted.bytes - more.kept_bytes
    # What only waits for its grace is no reason to evict more, and no room for more either.
    held = stats.in_grace_bytes
    if disk.delete_grace_s > 0:
        held += gone.bytes + evicted.deleted.bytes
    occupied = left - freed + held
    fits = config.quota_bytes is None or occupied <= config.quota_bytes
    copied += evicted.kept_bytes
    if not dry_run:
        remove_empty_folders(disk)
        _count(disk, gone, evicted, moved, copied)
        _report_shortage(disk, shortage)
        disk.full_classes = frozenset(stuck)
        disk.mark_collected()
    return GcReport(
        segments_expired=len(gone.segments),
        segments_evicted=len(evicted.deleted.segments),
        records_removed=gone.records - moved + evicted.lost_records + dropped,
        bytes_freed=gone.bytes + evicted.deleted.bytes,
        bytes_left=occupied,
        bytes_copied=copied,
        evicted_before_floor=evicted.early_records,
        adopted_writers=adopted,
        within_limits=excess <= freed and fits,
    )


def _over_a_quota(config: KVTierConfig, stats: FolderStats, total_bytes: int) -> bool:
    return over_limit(config, config.quota_bytes, total_bytes) > 0 or any(
        over_limit(config, quota, stats.bytes_of(cls)) > 0
        for cls, quota in config.class_quotas.items()
    )


def _count(disk: DiskTier, gone: Deleted, evicted: Evicted, moved: int, copied: int) -> None:
    disk.counts["gc_bytes"] += gone.bytes + evicted.deleted.bytes
    disk.counts["gc_expired_segments"] += len(gone.segments)
    disk.counts["gc_expired_records"] += gone.records - moved
    disk.counts["gc_evicted_segments"] += len(evicted.deleted.segments)
    disk.counts["gc_evicted_records"] += evicted.lost_records
    disk.counts["gc_spared_records"] += evicted.kept_records
    disk.counts["gc_copied_bytes"] += copied
    disk.counts["evicted_before_floor"] += evicted.early_records


def tidy(disk: DiskTier) -> int:
    """Housekeeping that takes no record away: adopt dead writers, finish promised deletions.

    returns: how many writers were adopted. raises: OSError.
    """
    adopted = _adopt_dead(disk)
    log_what_waits(disk)
    unlink_leftovers(disk)
    return adopted


def _shortage(disk: DiskTier, coming_bytes: int) -> int:
    """Bytes that the file system lacks to the free share it must keep.

    coming_bytes: what a deletion that was only planned would give back.
    """
    try:
        free, size = disk.io.space(disk.root)
    except FileNotFoundError:
        return 0  # the folder was removed meanwhile
    return max(0, int(disk.config.min_free_share * size) - free - coming_bytes)


def _report_shortage(disk: DiskTier, shortage: int) -> None:
    """Say it once when the file system becomes short, and count every collection that saw it."""
    if shortage:
        disk.counts["gc_low_space"] += 1
        if not disk.counts["low_space"]:
            logger.warning(
                "the file system of %s lacks %d bytes to the free share of %g: records are evicted"
                " early; give the cache a quota or the file system more room",
                disk.root,
                shortage,
                disk.config.min_free_share,
            )
    disk.counts["low_space"] = int(shortage > 0)


def _adopt_dead(disk: DiskTier) -> int:
    adopted = 0
    for name, log in disk.logs().items():
        try:
            adopted += not log.ended and adopt(disk, name)
        except (FileNotFoundError, PermissionError):
            continue  # a neighbour was quicker, or it is not ours to end
        except OSError as cause:
            # Its sealed segments can be deleted all the same, and then there is room to finish it.
            if not is_full(cause):
                raise
    if adopted:
        disk.refresh()
    return adopted


def remove_empty_folders(disk: DiskTier) -> None:
    """Folders of ended writers without segments; their key tombstones move to our own log."""
    for name, log in disk.logs().items():
        folder = disk.root / "w" / name
        if not log.ended:
            continue
        try:
            files = disk.io.listdir(folder)
        except PermissionError:
            continue
        except FileNotFoundError:
            disk.forget_log(name)
            disk.liveness.forget(name)
            continue
        if any(file.endswith(".kvs") for file in files):
            continue
        _carry_tombstones(disk, name)
        remove_folder(disk.io, folder)
        disk.forget_log(name)
        disk.liveness.forget(name)


def _carry_tombstones(disk: DiskTier, name: str) -> None:
    """Keep a removed log's tombstones: of keys as long as records older than them may still exist,
    of segments as long as a log names these, which would else look as if they were lost."""
    log = LogReader(disk.root / "w" / name, disk.store, disk.io)
    try:
        entries = log.poll()
    finally:
        log.close()
    oldest = min((segment.bucket for segment in disk.segments.all()), default=None)
    tombs = entries[(entries["flags"] & fmt.FLAG_TOMB_KEY) != 0]
    if oldest is not None and len(tombs):
        disk.append_control(tombs[tombs["created_s"] >= oldest])
    writers = {*disk.logs(), disk.writer_name} - {name}
    ends = entries[(entries["flags"] & fmt.FLAG_TOMB_SEGMENT) != 0]
    kept = [fmt.key_bytes(end).hex() in writers for end in ends]
    if any(kept):
        disk.append_control(ends[kept])


KEPT_SHARE: Final = 0.5
"""Of a segment's bytes, at most: an eviction must free something."""


def worth_keeping(disk: DiskTier, states: Iterable[SegmentStats]) -> dict[int, NDArray[Any]]:
    """Rows that deserve a second chance if their segment goes, by its number here."""
    used = rows_by_segment(disk.index.hit_rows())
    kept: dict[int, NDArray[Any]] = {}
    for state in states:
        if state.growing or state.local not in used:
            continue  # copies of what is in a growing segment would go to that very segment
        rows = alive_rows(disk, state.cls, used[state.local])
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
    disk: DiskTier,
    victims: Iterable[SegmentStats],
    kept: Mapping[int, NDArray[Any]],
    dry_run: bool,
) -> Kept:
    """Copy what is worth keeping of the victims, in at most a share of the time.

    raises: OSError, except for a full disk.
    """
    deadline = disk.clock.monotonic() + COPY_SHARE * disk.since_collected_s()
    records: dict[int, int] = {}
    copied = 0
    for state in victims:
        rows = kept.get(state.local)
        if rows is None or disk.clock.monotonic() >= deadline:
            continue
        if dry_run:
            records[state.local] = len(rows)
            copied += int(_slot_bytes(rows).sum())
            continue
        try:
            for record in copy_records(disk, disk, rows, state.cls):
                records[state.local] = records.get(state.local, 0) + 1
                copied += fmt.slot_bytes(record.nbytes)
                disk.counts["gc_copied_payload_bytes"] += record.nbytes
        except UnreadableError:
            disk.counts["gc_unreadable_segments"] += 1
        except OSError as cause:
            if not is_full(cause):
                raise
            break
        # Where its segment cannot go yet, it is not copied once more.
        disk.index.forget_hits(rows)
    return Kept(records, copied)


def _slot_bytes(rows: NDArray[Any]) -> NDArray[np.int64]:
    lengths, which = np.unique(rows["length"], return_inverse=True)
    sizes = np.array([fmt.slot_bytes(int(length)) for length in lengths], dtype=np.int64)
    return sizes[which]
