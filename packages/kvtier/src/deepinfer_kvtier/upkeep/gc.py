"""Collection: whole segments go, by age and by quota; what a dead process left is adopted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from deepinfer_kvtier.config import KVTierConfig
from deepinfer_kvtier.io import is_full
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.store.logs import LogReader
from deepinfer_kvtier.store.recover import adopt
from deepinfer_kvtier.store.writer import remove_folder
from deepinfer_kvtier.upkeep.choose import (
    choose_expired,
    choose_sparse,
    choose_victims,
    class_ranks,
    over_class_quotas,
    over_limit,
)
from deepinfer_kvtier.upkeep.deleting import (
    Deleted,
    delete_segments,
    emptied,
    log_what_waits,
    unlink_leftovers,
)
from deepinfer_kvtier.upkeep.evicting import Evicted, evict
from deepinfer_kvtier.upkeep.moving import copy_forward
from deepinfer_kvtier.upkeep.sparing import worth_keeping
from deepinfer_kvtier.upkeep.survey import Survey, take_survey
from deepinfer_kvtier.upkeep.tenants import enforce_namespace_quotas

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one collection did, or with `dry_run` would do. Sizes in bytes of the file system.

    segments_expired: segments without a living record, those that were rewritten included.
    bytes_copied:     living records that moved to new segments, second chances included.
    bytes_left:       everything under the directory; files that wait for their grace not counted.
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


def collect(directory: DirectoryTier, *, dry_run: bool = False) -> GcReport:
    """One pass: adopt, expire, rewrite what is mostly dead, enforce quotas and the free share.

    raises: OSError.
    """
    config = directory.config
    directory.refresh()
    adopted = 0 if dry_run else tidy(directory)
    dropped = 0 if dry_run else enforce_namespace_quotas(directory)
    survey = take_survey(directory)
    expired = choose_expired(survey.states, config.classes, directory.clock.wall())
    gone = delete_segments(directory, expired, dry_run)
    sparse = choose_sparse(survey.states)
    moved, copied = (0, 0) if dry_run else copy_forward(directory, sparse)
    gone += delete_segments(directory, emptied(directory, sparse), dry_run)
    rest = Survey(survey.total_bytes, [s for s in survey.states if s.local not in gone.segments])
    left = survey.total_bytes + copied - gone.bytes
    worth: Mapping[int, NDArray[Any]] = {}
    # A second chance takes room, so there is none on a file system that is short of it.
    if _over_a_quota(config, rest, left) and not _shortage(directory, gone.bytes * dry_run):
        worth = worth_keeping(directory, rest.states)
    stuck = over_class_quotas(config, rest)[1]
    evicted = evict(
        directory, lambda kept: over_class_quotas(config, rest, kept)[0], worth, dry_run
    )
    left += evicted.kept_bytes - evicted.deleted.bytes
    shortage = _shortage(directory, (gone.bytes + evicted.deleted.bytes) * dry_run)
    excess = max(over_limit(config, config.quota_bytes, left), shortage)
    states = [s for s in rest.states if s.local not in evicted.deleted.segments]
    ranks = class_ranks(config.classes)
    more = evict(
        directory, lambda kept: choose_victims(states, excess, ranks, kept), worth, dry_run
    )
    evicted += more
    freed = more.deleted.bytes - more.kept_bytes
    copied += evicted.kept_bytes
    if not dry_run:
        remove_empty_folders(directory)
        _count(directory, gone, evicted, moved, copied)
        _report_shortage(directory, shortage)
        directory.full_classes = frozenset(stuck)
        directory.mark_collected()
    return GcReport(
        segments_expired=len(gone.segments),
        segments_evicted=len(evicted.deleted.segments),
        records_removed=gone.records - moved + evicted.lost_records + dropped,
        bytes_freed=gone.bytes + evicted.deleted.bytes,
        bytes_left=left - freed,
        bytes_copied=copied,
        evicted_before_floor=evicted.early_records,
        adopted_writers=adopted,
        within_limits=excess <= freed,
    )


def _over_a_quota(config: KVTierConfig, survey: Survey, total_bytes: int) -> bool:
    return over_limit(config, config.quota_bytes, total_bytes) > 0 or any(
        over_limit(config, quota, survey.bytes_of(cls)) > 0
        for cls, quota in config.class_quotas.items()
    )


def _count(
    directory: DirectoryTier, gone: Deleted, evicted: Evicted, moved: int, copied: int
) -> None:
    directory.counts["gc_bytes"] += gone.bytes + evicted.deleted.bytes
    directory.counts["gc_expired_segments"] += len(gone.segments)
    directory.counts["gc_expired_records"] += gone.records - moved
    directory.counts["gc_evicted_segments"] += len(evicted.deleted.segments)
    directory.counts["gc_evicted_records"] += evicted.lost_records
    directory.counts["gc_spared_records"] += evicted.kept_records
    directory.counts["gc_copied_bytes"] += copied
    directory.counts["evicted_before_floor"] += evicted.early_records


def tidy(directory: DirectoryTier) -> int:
    """Housekeeping that takes no record away: adopt dead writers, finish promised deletions.

    returns: how many writers were adopted. raises: OSError.
    """
    adopted = _adopt_dead(directory)
    log_what_waits(directory)
    unlink_leftovers(directory)
    return adopted


def _shortage(directory: DirectoryTier, coming_bytes: int) -> int:
    """Bytes that the file system lacks to the free share it must keep.

    coming_bytes: what a deletion that was only planned would give back.
    """
    free, size = directory.io.space(directory.root)
    return max(0, int(directory.config.min_free_share * size) - free - coming_bytes)


def _report_shortage(directory: DirectoryTier, shortage: int) -> None:
    """Say it once when the file system becomes short, and count every collection that saw it."""
    if shortage:
        directory.counts["gc_low_space"] += 1
        if not directory.counts["low_space"]:
            logger.warning(
                "the file system of %s lacks %d bytes to the free share of %g: records are evicted"
                " early; give the cache a quota or the file system more room",
                directory.root,
                shortage,
                directory.config.min_free_share,
            )
    directory.counts["low_space"] = int(shortage > 0)


def _adopt_dead(directory: DirectoryTier) -> int:
    adopted = 0
    for name, log in directory.logs().items():
        try:
            adopted += not log.ended and adopt(directory, name)
        except OSError as cause:
            # Its sealed segments can be deleted all the same, and then there is room to finish it.
            if not is_full(cause):
                raise
    if adopted:
        directory.refresh()
    return adopted


def remove_empty_folders(directory: DirectoryTier) -> None:
    """Folders of ended writers without segments; their key tombstones move to our own log."""
    for name, log in directory.logs().items():
        folder = directory.root / "w" / name
        if not log.ended:
            continue
        try:
            files = directory.io.listdir(folder)
        except FileNotFoundError:
            directory.forget_log(name)
            directory.sharing.forget(name)
            continue
        if any(file.endswith(".kvs") for file in files):
            continue
        _carry_tombstones(directory, name)
        remove_folder(directory.io, folder)
        directory.forget_log(name)
        directory.sharing.forget(name)


def _carry_tombstones(directory: DirectoryTier, name: str) -> None:
    """Keep a removed log's tombstones: of keys as long as records older than them may still exist,
    of segments as long as a log names these, which would else look as if they were lost."""
    log = LogReader(directory.root / "w" / name, directory.store, directory.io)
    try:
        entries = log.poll()
    finally:
        log.close()
    oldest = min((segment.bucket for segment in directory.segments.all()), default=None)
    tombs = entries[(entries["flags"] & fmt.FLAG_TOMB_KEY) != 0]
    if oldest is not None and len(tombs):
        directory.append_control(tombs[tombs["created_s"] >= oldest])
    writers = {*directory.logs(), directory.writer_name} - {name}
    ends = entries[(entries["flags"] & fmt.FLAG_TOMB_SEGMENT) != 0]
    kept = [fmt.key_bytes(end).hex() in writers for end in ends]
    if any(kept):
        directory.append_control(ends[kept])
