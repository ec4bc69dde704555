"""Bringing what was used last back into the page cache, for example after a reboot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.upkeep.moving import read_slot


@dataclass(frozen=True, slots=True)
class WarmReport:
    """Records and slot bytes that were read; `bad` could not be, `kvtier fsck` says why."""

    records: int
    bytes: int
    bad: int


def warm_up(directory: DirectoryTier, limit_bytes: int) -> WarmReport:
    """Read the records used last, heads of chains first, until `limit_bytes` are read.

    raises: OSError where the directory itself cannot be read.
    """
    directory.refresh()
    rows = directory.index.rows()
    order = np.lexsort((rows["depth"], -rows["seen_s"].astype(np.int64)))
    sizes = np.cumsum([fmt.slot_bytes(int(n)) for n in rows["length"][order]])
    chosen = rows[order[: int(np.searchsorted(sizes, limit_bytes, side="right"))]]
    chosen.sort(order=["segment", "page"])
    good = total = 0
    for row in chosen:
        if not isinstance(read_slot(directory, row), str):
            good += 1
            total += fmt.slot_bytes(int(row["length"]))
    return WarmReport(good, total, len(chosen) - good)
