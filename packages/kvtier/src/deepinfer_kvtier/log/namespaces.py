"""Namespaces as the disk knows them: how much each one has, and making it have less.

The index in memory does not carry namespaces: they are read from the logs on request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.compaction import over_limit, writer_folders
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.log_reader import LogReader


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """One namespace: its name on disk (8 hex digits), records, payload and slot bytes."""

    name: str
    records: int
    payload_bytes: int
    disk_bytes: int


def parse_namespace(name: str) -> int:
    """The number behind the name of a namespace: its first 8 hex digits; `Namespace.id` will do.

    raises: ConfigError.
    """
    if not re.fullmatch("[0-9a-f]{8,}", name):
        raise ConfigError(f"a namespace is named by at least 8 hex digits, got {name!r}")
    return int(name[:8], 16)


def namespace_rows(disk: DiskTier) -> dict[int, NDArray[Any]]:
    """Rows of the index by namespace; 0 holds those that name none. raises: OSError."""
    rows = disk.index.rows()
    places = _places(rows)
    order = np.argsort(places)
    tags = np.zeros(len(rows), dtype=np.uint32)
    for name in writer_folders(disk):
        writer = bytes.fromhex(name)
        log = LogReader(disk.root / "w" / name, disk.store, disk.io)
        try:
            entries = log.poll()
        except PermissionError:
            continue
        finally:
            log.close()
        entries = entries[(entries["flags"] & fmt.CONTROL_FLAGS) == 0]
        numbers, inverse = np.unique(entries["segment"], return_inverse=True)
        local = np.array(
            [disk.segments.need(writer, int(n)).local for n in numbers], dtype=np.uint64
        )
        if not len(entries) or not len(rows):
            continue
        wanted = local[inverse] << np.uint64(32) | entries["page"].astype(np.uint64)
        at = np.minimum(np.searchsorted(places[order], wanted), len(rows) - 1)
        same = places[order][at] == wanted
        tags[order[at[same]]] = entries["namespace"][same]
    return {int(tag): rows[tags == tag] for tag in np.unique(tags)}


def list_namespaces(disk: DiskTier) -> list[NamespaceUsage]:
    """What each namespace has, most bytes first. raises: OSError."""
    disk.refresh()
    listed = [
        NamespaceUsage(f"{tag:08x}", len(rows), int(rows["length"].sum()), _slot_sum(rows))
        for tag, rows in namespace_rows(disk).items()
    ]
    return sorted(listed, key=lambda usage: -usage.disk_bytes)


def drop_namespace(disk: DiskTier, name: str) -> int:
    """Hide every record of a namespace, in every process; returns how many. raises: OSError."""
    disk.refresh()
    return _tombstone(disk, namespace_rows(disk).get(parse_namespace(name), _NO_ROWS))


def enforce_namespace_quotas(disk: DiskTier) -> int:
    """Hide the longest unused records of namespaces over their quota, deepest first.

    Their space returns when the segments they lie in expire or are rewritten. returns: records
    hidden. raises: OSError.
    """
    config = disk.config
    if not config.namespace_quotas:
        return 0
    found = namespace_rows(disk)
    leased = [s.local for s in disk.segments.all() if disk.segments.is_leased(s)]
    hidden = 0
    for name, quota in config.namespace_quotas.items():
        rows = found.get(parse_namespace(name), _NO_ROWS)
        excess = over_limit(config, quota, _slot_sum(rows))
        if excess <= 0:
            continue
        # What some process may be about to load goes at a later collection.
        rows = rows[~np.isin(rows["segment"], leased)]
        order = np.lexsort((-rows["depth"].astype(np.int64), rows["seen_s"]))
        sizes = np.array([fmt.slot_bytes(int(n)) for n in rows["length"][order]])
        count = int(np.searchsorted(np.cumsum(sizes), excess)) + 1
        hidden += _tombstone(disk, rows[order[:count]])
    disk.counts["gc_namespace_records"] += hidden
    return hidden


def _tombstone(disk: DiskTier, rows: NDArray[Any]) -> int:
    hidden = 0
    for kind, shard in {(int(row["kind"]), int(row["shard"])) for row in rows}:
        some = rows[(rows["kind"] == kind) & (rows["shard"] == shard)]
        # The index knows 16 bytes of a digest, and a tombstone needs no more.
        hidden += disk.delete(kind, shard, [fmt.key_bytes(row) + bytes(16) for row in some])
    disk.write_control()
    return hidden


def _places(rows: NDArray[Any]) -> NDArray[np.uint64]:
    return rows["segment"].astype(np.uint64) << np.uint64(32) | rows["page"].astype(np.uint64)


def _slot_sum(rows: NDArray[Any]) -> int:
    lengths, counts = np.unique(rows["length"], return_counts=True)
    return sum(fmt.slot_bytes(int(n)) * int(c) for n, c in zip(lengths, counts, strict=True))


_NO_ROWS: NDArray[Any] = np.zeros(0, dtype=[("length", "<u4"), ("kind", "u1"), ("shard", "u1")])
