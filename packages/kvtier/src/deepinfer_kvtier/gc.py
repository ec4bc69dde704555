"""Collection: whole segments go, by age and by quota; what a dead process left is adopted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.directory import DirectoryTier
from deepinfer_kvtier.logs import LogReader
from deepinfer_kvtier.recover import adopt
from deepinfer_kvtier.retention import RetentionClass
from deepinfer_kvtier.segments import Segment, parse_segment_name
from deepinfer_kvtier.writer import remove_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SegmentState:
    """What decides over a segment.

    last_seen_s: newest use of any of its records; 0 when it has none left.
    deletable:   no other process appends to it; one that grows here is sealed first.
    """

    local: int
    cls: str
    bytes: int
    records: int
    last_seen_s: int
    youngest_floor: bool
    deletable: bool


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one collection did, or with `dry_run` would do. Sizes in bytes of the file system."""

    segments_expired: int
    segments_evicted: int
    records_removed: int
    bytes_freed: int
    bytes_left: int
    evicted_before_floor: int
    adopted_writers: int
    within_limits: bool


def choose_expired(
    states: Iterable[SegmentState], classes: dict[str, RetentionClass], now_s: float
) -> list[SegmentState]:
    """Segments whose every record is past its time to live; unknown classes never expire."""
    gone: list[SegmentState] = []
    for state in states:
        policy = classes.get(state.cls)
        expired = (
            policy is not None
            and policy.ttl_s is not None
            and now_s - state.last_seen_s >= policy.ttl_s
        )
        if state.deletable and (state.records == 0 or expired):
            gone.append(state)
    return gone


def choose_victims(
    states: Iterable[SegmentState], excess_bytes: int, ranks: dict[str, int]
) -> list[SegmentState]:
    """Segments to evict until `excess_bytes` are free: lowest rank first, then longest unused.

    Classes without an entry in `ranks` (those that never expire) are never evicted.
    """
    candidates = [state for state in states if state.deletable and state.cls in ranks]
    candidates.sort(key=lambda state: (ranks[state.cls], state.last_seen_s))
    victims: list[SegmentState] = []
    for state in candidates:
        if excess_bytes <= 0:
            break
        victims.append(state)
        excess_bytes -= state.bytes
    return victims


def collect(directory: DirectoryTier, *, dry_run: bool = False) -> GcReport:
    """One pass: adopt, expire, enforce the quota and the free-space guard. raises: OSError."""
    config = directory.config
    directory.refresh()
    adopted = 0 if dry_run else tidy(directory)
    total, states = _survey(directory)
    now = directory.clock.wall()
    expired = choose_expired(states, config.classes, now)
    freed, removed = _delete(directory, expired, dry_run)
    remaining = [state for state in states if state not in expired]
    left = total - freed
    shortage = _shortage(directory, freed if dry_run else 0)
    excess = max(_over_quota(directory, left), shortage)
    victims = choose_victims(remaining, excess, _ranks(config.classes))
    early = sum(victim.records for victim in victims if victim.youngest_floor)
    evicted_bytes, evicted_records = _delete(directory, victims, dry_run)
    left -= evicted_bytes
    if not dry_run:
        _remove_empty_folders(directory)
        directory.counts["gc_bytes"] += freed + evicted_bytes
        directory.counts["gc_expired_segments"] += len(expired)
        directory.counts["gc_evicted_segments"] += len(victims)
        directory.counts["evicted_before_floor"] += early
        _report_shortage(directory, shortage)
    return GcReport(
        segments_expired=len(expired),
        segments_evicted=len(victims),
        records_removed=removed + evicted_records,
        bytes_freed=freed + evicted_bytes,
        bytes_left=left,
        evicted_before_floor=early,
        adopted_writers=adopted,
        within_limits=excess <= evicted_bytes,
    )


def _ranks(classes: dict[str, RetentionClass]) -> dict[str, int]:
    """Shorter-lived classes are evicted first."""
    mortal = [(policy.ttl_s, name) for name, policy in classes.items() if policy.ttl_s is not None]
    return {name: rank for rank, (_, name) in enumerate(sorted(mortal))}


def tidy(directory: DirectoryTier) -> int:
    """Housekeeping that takes no record away: adopt dead writers, finish promised deletions.

    returns: how many writers were adopted. raises: OSError.
    """
    adopted = _adopt_dead(directory)
    directory.write_control()
    _unlink_leftovers(directory)
    return adopted


def _over_quota(directory: DirectoryTier, total: int) -> int:
    config = directory.config
    if config.quota_bytes is None or total <= config.high_water * config.quota_bytes:
        return 0
    return total - int(config.low_water * config.quota_bytes)


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


def _survey(directory: DirectoryTier) -> tuple[int, list[SegmentState]]:
    """Bytes of everything under the root, and the state of each segment."""
    config = directory.config
    now = directory.clock.wall()
    logs = directory.logs()
    total = 0
    sizes: dict[int, int] = {}
    for name in directory.io.listdir(directory.root / "w"):
        if len(name) != 32:
            continue
        writer = bytes.fromhex(name)
        directory.segments.discover(writer)
        folder = directory.root / "w" / name
        with contextlib.suppress(FileNotFoundError):
            for file in directory.io.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    size = directory.io.disk_bytes(folder / file)
                    total += size
                    segment = _segment_of(directory, writer, file)
                    if segment is not None:
                        sizes[segment.local] = size
    rows = directory.index.stored_rows()
    states: list[SegmentState] = []
    by_segment = _rows_by_segment(rows)
    for segment in directory.segments.all():
        members = by_segment.get(segment.local)
        seen = int(members["seen_s"].max()) if members is not None else 0
        writer_name = segment.writer.hex()
        ended = writer_name in logs and logs[writer_name].ended
        mine = writer_name == directory.writer_name
        states.append(
            SegmentState(
                local=segment.local,
                cls=segment.cls,
                bytes=sizes.get(segment.local, 0),
                records=0 if members is None else len(members),
                last_seen_s=seen,
                youngest_floor=now - seen < config.floor_s,
                deletable=not (directory.is_growing(segment) and members is None)
                and (segment.sealed or ended or mine),
            )
        )
    return total, states


def _segment_of(directory: DirectoryTier, writer: bytes, file: str) -> Segment | None:
    parsed = parse_segment_name(file)
    return directory.segments.named(writer, parsed[2]) if parsed else None


def _rows_by_segment(rows: NDArray[Any]) -> dict[int, NDArray[Any]]:
    if not len(rows):
        return {}
    ordered = rows[np.argsort(rows["segment"], kind="stable")]
    numbers, starts = np.unique(ordered["segment"], return_index=True)
    return {
        int(number): part
        for number, part in zip(numbers, np.split(ordered, starts[1:]), strict=True)
    }


def _delete(directory: DirectoryTier, states: list[SegmentState], dry_run: bool) -> tuple[int, int]:
    """Tombstone, forget, unlink; returns bytes and records. Who reads now keeps its descriptor."""
    freed = records = 0
    chosen = [directory.segments.get(state.local) for state in states]
    growing = [segment for segment in chosen if directory.is_growing(segment)]
    if growing and not dry_run:
        directory.seal({segment.number for segment in growing})
    for state in states:
        if dry_run:
            freed += state.bytes
            records += state.records
            continue
        segment = directory.segments.get(state.local)
        if segment in growing and _records_in(directory, segment) > state.records:
            continue  # it grew between the survey and its sealing: what is new stays
        directory.append_control(_segment_tombstone(segment))
        segment.buried = True
        directory.index.forget_segment(segment)
        directory.io.unlink(segment.path)
        segment.buried = False
        freed += state.bytes
        records += state.records
    return freed, records


def _records_in(directory: DirectoryTier, segment: Segment) -> int:
    return int((directory.index.stored_rows()["segment"] == segment.local).sum())


def _segment_tombstone(segment: Segment) -> NDArray[Any]:
    entry = np.zeros(1, dtype=fmt.ENTRY)
    entry["key_lo"] = int.from_bytes(segment.writer[:8], "little")
    entry["key_hi"] = int.from_bytes(segment.writer[8:], "little")
    entry["segment"] = segment.number
    entry["flags"] = fmt.FLAG_TOMB_SEGMENT
    return entry


def _unlink_leftovers(directory: DirectoryTier) -> None:
    """Files whose deletion was promised and then failed."""
    for segment in directory.segments.buried():
        directory.io.unlink(segment.path)
        segment.buried = False


def _adopt_dead(directory: DirectoryTier) -> int:
    adopted = 0
    for name, log in directory.logs().items():
        if not log.ended and adopt(directory, name):
            adopted += 1
    if adopted:
        directory.refresh()
    return adopted


def _remove_empty_folders(directory: DirectoryTier) -> None:
    """Folders of ended writers without segments; their key tombstones move to our own log."""
    for name, log in directory.logs().items():
        folder = directory.root / "w" / name
        if not log.ended:
            continue
        try:
            files = directory.io.listdir(folder)
        except FileNotFoundError:
            directory.forget_log(name)
            continue
        if any(file.endswith(".kvs") for file in files):
            continue
        _carry_tombstones(directory, name)
        remove_folder(directory.io, folder)
        directory.forget_log(name)


def _carry_tombstones(directory: DirectoryTier, name: str) -> None:
    """Keep a removed log's key tombstones as long as records older than them may still exist."""
    log = LogReader(directory.root / "w" / name, directory.store, directory.io)
    try:
        entries = log.poll()
    finally:
        log.close()
    oldest = min((segment.bucket for segment in directory.segments.all()), default=None)
    tombs = entries[(entries["flags"] & fmt.FLAG_TOMB_KEY) != 0]
    if oldest is not None and len(tombs):
        directory.append_control(tombs[tombs["created_s"] >= oldest])
