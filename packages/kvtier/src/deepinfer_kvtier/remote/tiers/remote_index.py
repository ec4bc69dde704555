"""What other writers keep in an object store, as this process knows it: the usual table of rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.values import APPROXIMATE_BIT
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.index import ROW, EntryTable


@dataclass(slots=True, eq=False)
class RemoteSegment:
    """One segment object; `local` is its number in rows of this process."""

    local: int
    writer: str
    number: int
    gone: bool = False


class RemoteIndex:
    """Rows of all known segments, with tombstones applied. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._table = EntryTable()
        # Further copies of records in the table, stored by several writers at the same time.
        self._duplicates: NDArray[Any] = np.zeros(0, dtype=ROW)
        self._segments: list[RemoteSegment] = []
        self._by_name: dict[tuple[str, int], RemoteSegment] = {}
        self._tombs: dict[tuple[int, int, int, int], int] = {}
        self._fresh_tombs: set[tuple[int, int, bytes]] = set()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._table.nbytes

    def segment(self, local: int) -> RemoteSegment:
        """By the number rows carry."""
        return self._segments[local]

    def named(self, writer: str, number: int) -> RemoteSegment:
        """By writer and number; made known when it was not."""
        with self._lock:
            known = self._by_name.get((writer, number))
            if known is None:
                known = RemoteSegment(len(self._segments), writer, number)
                self._segments.append(known)
                self._by_name[writer, number] = known
            return known

    def known(self, writer: str) -> set[int]:
        """Numbers of the living segments of a writer."""
        with self._lock:
            return {n for (name, n), s in self._by_name.items() if name == writer and not s.gone}

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """Rows for digests, in order; `length` is 0xFFFFFFFF where there is none."""
        lo, hi = fmt.key_columns(list(digests))
        with self._lock:
            return self._table.probe(lo, hi, kind, shard)

    def add(self, writer: str, entries: NDArray[Any]) -> None:
        """Take in the entries of one index object: records and key tombstones."""
        for entry in entries[(entries["flags"] & fmt.FLAG_TOMB_KEY) != 0]:
            self._tombstone(entry)
        records = entries[(entries["flags"] & fmt.CONTROL_FLAGS) == 0]
        if not len(records):
            return
        owners = {n: self.named(writer, int(n)) for n in np.unique(records["segment"])}
        rows = np.zeros(len(records), dtype=ROW)
        for name in ("key_lo", "key_hi", "page", "length", "kind", "shard", "cls", "depth"):
            rows[name] = records[name]
        rows["segment"] = [owners[n].local for n in records["segment"]]
        rows["seen_s"] = records["created_s"]
        rows["flags"] = np.minimum(records["generation"], 127)
        rows["flags"][(records["flags"] & fmt.FLAG_APPROXIMATE) != 0] |= APPROXIMATE_BIT
        alive = np.array([not owners[n].gone for n in records["segment"]], dtype=np.bool_)
        with self._lock:
            fresh = rows[alive & ~self._buried(records)]
            added = self._table.insert(fresh)
            self._duplicates = np.concatenate((self._duplicates, fresh[~added]))

    def newest_tomb_ms(self, names: Iterable[tuple[int, int, bytes]]) -> int:
        """Time of the newest tombstone of records of these kinds, shards and digests; 0 = none."""
        newest = 0
        with self._lock:
            for kind, shard, digest in names if self._tombs else ():
                lo, hi = fmt.key_columns([digest])
                newest = max(newest, self._tombs.get((int(lo[0]), int(hi[0]), kind, shard), 0))
        return newest

    def rows(self) -> NDArray[Any]:
        """A copy of the row of every record, for listings."""
        with self._lock:
            return self._table.rows()

    def forget(self, kind: int, shard: int, digest: bytes, local: int) -> None:
        """The place the index names does not hold the record: do not look there again."""
        lo, hi = fmt.key_columns([digest])
        with self._lock:
            number = self._table.find(lo, hi, kind, shard)
            if number[0] >= 0 and int(self._table.take(number)["segment"][0]) == local:
                self._table.remove(number)
                self._use_spares()

    def forget_segment(self, segment: RemoteSegment) -> None:
        """The object is gone, or about to be."""
        with self._lock:
            segment.gone = True
            self._table.remove(self._table.numbers_in_segment(segment.local))
            self._duplicates = self._duplicates[self._duplicates["segment"] != segment.local]
            self._use_spares()

    def drain_tombs(self) -> set[tuple[int, int, bytes]]:
        """(kind, shard, 16-byte key) of what was buried since the last call, here or elsewhere."""
        if not self._fresh_tombs:
            return set()
        with self._lock:
            fresh, self._fresh_tombs = self._fresh_tombs, set()
            return fresh

    def _tombstone(self, entry: Any) -> None:
        key = _tomb_key(entry)
        stamp = _stamp(entry)
        with self._lock:
            if self._tombs.get(key, -1) >= stamp:
                return
            self._tombs[key] = stamp
            self._fresh_tombs.add((key[2], key[3], fmt.key_bytes(entry)))
            lo, hi = np.array([key[0]], dtype="<u8"), np.array([key[1]], dtype="<u8")
            number = self._table.find(lo, hi, key[2], key[3])
            if number[0] >= 0:
                self._table.remove(number)
            copies = (self._duplicates["key_lo"] == lo[0]) & (self._duplicates["key_hi"] == hi[0])
            copies &= (self._duplicates["kind"] == key[2]) & (self._duplicates["shard"] == key[3])
            self._duplicates = self._duplicates[~copies]

    def _buried(self, entries: NDArray[Any]) -> NDArray[np.bool_]:
        result = np.zeros(len(entries), dtype=np.bool_)
        if self._tombs:
            lows = np.array([key[0] for key in self._tombs], dtype="<u8")
            for i in np.flatnonzero(np.isin(entries["key_lo"], lows)):
                entry = entries[i]
                key = _tomb_key(entry)
                result[i] = _stamp(entry) <= self._tombs.get(key, -1)
        return result

    def _use_spares(self) -> None:
        if len(self._duplicates):
            self._duplicates = self._duplicates[~self._table.insert(self._duplicates)]


def _stamp(entry: Any) -> int:
    return int(entry["created_s"]) * 1000 + int(entry["created_ms"])


def _tomb_key(entry: Any) -> tuple[int, int, int, int]:
    return int(entry["key_lo"]), int(entry["key_hi"]), int(entry["kind"]), int(entry["shard"])
