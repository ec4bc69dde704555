"""Segment files that are gone although nobody deleted them: what their logs still know of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.values import NO_ROW
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.compaction import writer_folders
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.gc import segment_tombstone
from deepinfer_kvtier.log.log_reader import LogReader
from deepinfer_kvtier.log.segments import parse_segment_name

_Name = tuple[bytes, int]  # writer, number of the segment


@dataclass(frozen=True, slots=True)
class MissingSegment:
    """A segment without file or tombstone; `records`: those of it that are stored nowhere else."""

    writer: bytes
    number: int
    records: int


def find_missing(disk: DiskTier) -> list[MissingSegment]:
    """Every segment that a log names, that no log calls deleted, and whose file is not there.

    This process stops looking for their records. What a snapshot or a removed log has forgotten is
    not found. raises: OSError.
    """
    before = _files(disk)
    named: dict[_Name, list[NDArray[Any]]] = {}
    deleted: set[_Name] = set()
    for folder in list(writer_folders(disk)):
        writer = bytes.fromhex(folder)
        entries = _entries(disk, folder)
        tombs = entries[(entries["flags"] & fmt.FLAG_TOMB_SEGMENT) != 0]
        deleted |= {(fmt.key_bytes(tomb), int(tomb["segment"])) for tomb in tombs}
        data = entries[(entries["flags"] & fmt.CONTROL_FLAGS) == 0]
        for number in np.unique(data["segment"]).tolist():
            if (writer, number) not in before:
                named.setdefault((writer, number), []).append(data[data["segment"] == number])
    suspects = named.keys() - deleted
    if suspects:
        suspects -= _files(disk)  # it began after the first look
    for writer, number in suspects:
        segment = disk.segments.named(writer, number)
        if segment is not None:  # on a mounted file system the index believes what logs announce
            disk.index.forget_segment(segment)
    return [
        MissingSegment(*name, _lost_records(disk, np.concatenate(named[name])))
        for name in sorted(suspects)
    ]


def tombstone_missing(disk: DiskTier, lost: Iterable[MissingSegment]) -> None:
    """Tell every process, and every later check, that these segments are gone. raises: OSError."""
    for item in lost:
        disk.append_control(segment_tombstone(item.writer, item.number))


def _files(disk: DiskTier) -> set[_Name]:
    found: set[_Name] = set()
    for folder in list(writer_folders(disk)):
        try:
            names = disk.io.listdir(disk.root / "w" / folder)
        except FileNotFoundError:
            continue
        parsed = (parse_segment_name(name) for name in names)
        found |= {(bytes.fromhex(folder), name[2]) for name in parsed if name is not None}
    return found


def _entries(disk: DiskTier, folder: str) -> NDArray[Any]:
    log = LogReader(disk.root / "w" / folder, disk.store, disk.io)
    try:
        return log.poll()
    finally:
        log.close()


def _lost_records(disk: DiskTier, entries: NDArray[Any]) -> int:
    """How many of these records nobody dropped and nobody else has stored."""
    entries = entries[~disk.index.tombstoned(entries)]
    lost = 0
    for kind, shard in {(int(entry["kind"]), int(entry["shard"])) for entry in entries}:
        some = entries[(entries["kind"] == kind) & (entries["shard"] == shard)]
        keys = sorted({fmt.key_bytes(entry) for entry in some})
        rows = disk.index.probe(kind, shard, [key + bytes(16) for key in keys])
        lost += int((rows["length"] == NO_ROW).sum())
    return lost
