"""Checking stored records without any prompt: is each one what the index says it is?"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.upkeep.moving import read_slot


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
    directory: DirectoryTier, *, sample: float = 1.0, seed: int = 0, repair: bool = False
) -> VerifyReport:
    """Read records back and compare trailer, key and checksum.

    sample: share of the records to read; the choice follows from `seed`.
    repair: hide bad records, so that the next request computes and stores them again.
    raises: OSError where the directory itself cannot be read.
    """
    directory.refresh()
    chooser = random.Random(seed)
    rows = directory.index.rows()
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
        read = read_slot(directory, row)
        if isinstance(read, str):
            bad[read] += 1
            broken.append((int(row["kind"]), int(row["shard"]), fmt.key_bytes(row)))
            places.append(_place(directory, row))
    if repair:
        for kind, shard, key in broken:
            # The index knows 16 bytes of a digest, and a tombstone needs no more.
            directory.bury(kind, shard, [key + bytes(16)])
        directory.write_control()
    return VerifyReport(
        checked,
        total,
        dict(bad),
        tuple(key.hex() for _, _, key in broken),
        tuple(places),
        len(broken) if repair else 0,
    )


def _place(directory: DirectoryTier, row: Any) -> str:
    path = directory.segments.get(int(row["segment"])).path.relative_to(directory.root)
    size = fmt.slot_bytes(int(row["length"]))
    return f"{path} offset {int(row['page']) * fmt.PAGE} bytes {size}"
