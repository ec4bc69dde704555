"""Index of the directory tier: one table fed by the logs of all writers, tombstones included."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.quality import APPROXIMATE_BIT
from deepinfer_kvtier.retention import RetentionClass
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.segments import Segment, SegmentSet
from deepinfer_kvtier.store.table import ROW, EntryTable

RECENT: Final = 1 << 15
"""Entries that are remembered with their times, for tombstones that are read after them."""


class DirectoryIndex:
    """Where every record of a directory lies, as far as its logs have been read.

    All methods may be called from several threads; the lock is never held during I/O.

    linger_s: seconds for which records of a segment that another process has given up can still be
              found, because its file is still there: what one process has leased another one may
              be about to load. Such records count for nothing else.
    now_s:    monotonic time, later told by `pass_time`.
    """

    def __init__(self, segments: SegmentSet, *, linger_s: float = 0.0, now_s: float = 0.0) -> None:
        self._segments = segments
        self._linger_s = linger_s
        self._now_s = now_s
        self._lingering: dict[int, float] = {}
        self._lock = threading.RLock()
        self._table = EntryTable()
        # Further copies of records in the table, written by other processes at the same time.
        self._spares: NDArray[Any] = np.zeros(0, dtype=ROW)
        self._tombs: dict[tuple[int, int, int, int], int] = {}
        # Entries as they came last, with their times: rows have none to the millisecond.
        self._recent: list[NDArray[Any]] = []
        self._last_tomb_ms = 0  # of this process
        self._newest_tomb_ms = 0
        self._fresh_tombs: set[tuple[int, bytes]] = set()
        self._removed: list[tuple[bytes, int, int]] = []

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """Rows for digests, in order; `length` is 0xFFFFFFFF where there is none."""
        lo, hi = fmt.key_columns(list(digests))
        with self._lock:
            return self._table.probe(lo, hi, kind, shard)

    def touch(
        self,
        kind: int,
        shard: int,
        digests: Sequence[bytes],
        now_s: int,
        classes: Iterable[RetentionClass],
    ) -> NDArray[Any] | None:
        """Record a hit; the entry to log when the last mark is an eighth of a lifetime old."""
        lo, hi = fmt.key_columns(list(digests))
        with self._lock:
            numbers = self._table.find(lo, hi, kind, shard)
            there = numbers >= 0
            self._table.mark_hit(numbers[there])
            stale = aged(self._table.take(numbers[there]), now_s, classes)
            if not stale.any():
                return None
            self._table.touch(numbers[there][stale], now_s)
        entries = np.zeros(int(stale.sum()), dtype=fmt.ENTRY)
        entries["key_lo"], entries["key_hi"] = lo[there][stale], hi[there][stale]
        entries["kind"], entries["shard"] = kind, shard
        entries["flags"] = fmt.FLAG_TOUCH
        entries["created_s"] = now_s
        return entries

    def apply(self, batches: list[tuple[bytes, NDArray[Any]]]) -> None:
        """Tombstones of all logs first: the order between logs is only known by their times."""
        masks = [(entries["flags"] & fmt.CONTROL_FLAGS) != 0 for _, entries in batches]
        control = [
            (writer, entries[mask])
            for (writer, entries), mask in zip(batches, masks, strict=True)
            if mask.any()
        ]
        for _, entries in control:
            for entry in _flagged(entries, fmt.FLAG_TOMB_KEY):
                self._bury_key(entry)
            for entry in _flagged(entries, fmt.FLAG_TOMB_SEGMENT):
                segment = self._segments.need(fmt.key_bytes(entry), int(entry["segment"]))
                self._give_up(segment)
        for writer, entries in control:
            for entry in _flagged(entries, fmt.FLAG_SEGMENT):
                cls, bucket = int(entry["cls"]), int(entry["created_s"])
                self._segments.announced(writer, int(entry["segment"]), cls, bucket)
        for (writer, entries), mask in zip(batches, masks, strict=True):
            self._insert(writer, entries[~mask] if mask.any() else entries)
        for writer, entries in control:
            for entry in _flagged(entries, fmt.FLAG_SEAL):
                self._segments.need(writer, int(entry["segment"])).sealed = True
            self._apply_touches(_flagged(entries, fmt.FLAG_TOUCH))

    def _give_up(self, segment: Segment) -> None:
        """Another process has: at once, or after a while for what is in use here."""
        with self._lock:
            known = len(self._table.numbers_in_segment(segment.local)) > 0
            linger = self._linger_s > 0 and known and not segment.buried
            if linger:
                self._lingering[segment.local] = self._now_s + self._linger_s
        segment.buried = True
        if not linger and segment.local not in self._lingering:
            self.forget_segment(segment)

    def pass_time(self, now_s: float) -> None:
        """Forget what has lingered long enough. now_s: monotonic seconds."""
        self._now_s = now_s
        for local, until_s in list(self._lingering.items()):
            if now_s >= until_s:
                self.forget_segment(self._segments.get(local))

    def lingers(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Rows whose segment is about to be deleted."""
        if not self._lingering:
            return np.zeros(len(rows), dtype=np.bool_)
        with self._lock:
            return np.isin(rows["segment"], list(self._lingering))

    def _apply_touches(self, touches: NDArray[Any]) -> None:
        with self._lock:
            for kind, shard in {(int(t["kind"]), int(t["shard"])) for t in touches}:
                some = touches[(touches["kind"] == kind) & (touches["shard"] == shard)]
                found = self._table.find(some["key_lo"], some["key_hi"], kind, shard)
                there = found >= 0
                self._table.touch(found[there], some["created_s"][there])
                self._table.mark_hit(found[there])

    def bury(
        self, kind: int, shard: int, digests: Sequence[bytes], wall_ms: int
    ) -> tuple[int, NDArray[Any]]:
        """Hide everything stored for digests until now; returns how many were here, and the
        tombstones to log."""
        lo, hi = fmt.key_columns(list(digests))
        with self._lock:
            numbers = self._table.find(lo, hi, kind, shard)
            rows = self._table.take(numbers[numbers >= 0])
            copies = self._spares[np.isin(self._spares["key_lo"], lo)]
            stamp = max(wall_ms, self._last_tomb_ms + 1)
            stamp = self._last_tomb_ms = self._no_earlier(stamp, np.concatenate((rows, copies)))
        entries = np.zeros(len(digests), dtype=fmt.ENTRY)
        entries["key_lo"], entries["key_hi"] = lo, hi
        entries["kind"], entries["shard"] = kind, shard
        entries["flags"] = fmt.FLAG_TOMB_KEY
        entries["created_s"], entries["created_ms"] = stamp // 1000, stamp % 1000
        with self._lock:
            for entry in entries:
                self._bury_key(entry)
        return len(rows), entries

    def newest_tomb_ms(self, names: Iterable[tuple[int, int, bytes]], wall_ms: int) -> int:
        """Time of the newest tombstone that records of these kinds, shards and digests must be
        later than, or they would count as buried; 0 when all tombstones are in the past."""
        with self._lock:
            if self._newest_tomb_ms < wall_ms:
                return 0
            keys: list[tuple[int, int, int, int]] = []
            for kind, shard, digest in names:
                lo, hi = fmt.key_columns([digest])
                keys.append((int(lo[0]), int(hi[0]), kind, shard))
            return max((self._tombs.get(key, 0) for key in keys), default=0)

    def _no_earlier(self, stamp: int, rows: NDArray[Any]) -> int:
        """A time that is not before these records were written, by whatever clock they were."""
        seen_ms = rows["seen_s"].astype(np.int64) * 1000
        end_ms = seen_ms + 999  # rows know the second only
        doubtful = (seen_ms <= stamp) & (end_ms > stamp)
        for entries in self._recent if doubtful.any() else []:
            same = entries[np.isin(entries["key_lo"], rows["key_lo"][doubtful])]
            written_ms = same["created_s"].astype(np.int64) * 1000 + same["created_ms"]
            stamp = max(stamp, int(written_ms.max(initial=0)))
            doubtful &= ~np.isin(rows["key_lo"], same["key_lo"])
        return max(stamp, int(end_ms[doubtful | (seen_ms > stamp)].max(initial=0)))

    def forget_segment(self, segment: Segment) -> NDArray[Any]:
        """The file is gone: take its rows out and return them."""
        with self._lock:
            numbers = self._table.numbers_in_segment(segment.local)
            rows = self._table.remove(numbers)
            self._lingering.pop(segment.local, None)
            self._spares = self._spares[self._spares["segment"] != segment.local]
            self._note_removed(self._without_replaced(rows))
        self._segments.mark_gone(segment)
        return rows

    def unlearn(self, segment: Segment) -> None:
        """Let go of the rows of a segment that may well be there: to be asked for again."""
        with self._lock:
            self._table.remove(self._table.numbers_in_segment(segment.local))
            self._spares = self._spares[self._spares["segment"] != segment.local]

    def forget(self, kind: int, shard: int, digest: bytes, segment: int) -> None:
        """The place the index names does not hold the record: do not look there again."""
        lo, hi = fmt.key_columns([digest])
        with self._lock:
            number = self._table.find(lo, hi, kind, shard)
            if number[0] >= 0 and int(self._table.take(number)["segment"][0]) == segment:
                self._note_removed(self._without_replaced(self._table.remove(number)))

    def rows(self) -> NDArray[Any]:
        """A copy of the row of every record that stays, for listings."""
        with self._lock:
            rows = self._table.rows()
            return rows[~self.lingers(rows)] if self._lingering else rows

    def stored_rows(self) -> NDArray[Any]:
        """A copy of the rows of everything stored, further copies of a record included."""
        with self._lock:
            return np.concatenate((self.rows(), self._spares))

    def hit_rows(self) -> NDArray[Any]:
        """Copies of the rows that were used since they came, as far as this process knows."""
        with self._lock:
            return self._table.hit_rows()

    def forget_hits(self, rows: NDArray[Any]) -> None:
        """Count these rows as not used since they came."""
        with self._lock:
            numbers = self._table.find_rows(rows)
            self._table.mark_hit(numbers[numbers >= 0], hit=False)

    def drain_removed(self) -> list[tuple[bytes, int, int]]:
        """(key, kind, depth) of records that left since the last call, for events."""
        if not self._removed:
            return []
        with self._lock:
            gone, self._removed = self._removed, []
            return gone

    def drain_tombs(self) -> set[tuple[int, bytes]]:
        """(kind, 16-byte key) of what was buried since the last call, here or elsewhere."""
        if not self._fresh_tombs:
            return set()
        with self._lock:
            fresh, self._fresh_tombs = self._fresh_tombs, set()
            return fresh

    def buried(self, entries: NDArray[Any]) -> NDArray[np.bool_]:
        """Entries written before a tombstone for their key: bool per entry."""
        result = np.zeros(len(entries), dtype=np.bool_)
        if not self._tombs:
            return result
        lows = np.array([key[0] for key in self._tombs], dtype="<u8")
        for i in np.flatnonzero(np.isin(entries["key_lo"], lows)):
            entry = entries[i]
            stamp = int(entry["created_s"]) * 1000 + int(entry["created_ms"])
            result[i] = stamp <= self._tombs.get(_tomb_key(entry), -1)
        return result

    def _bury_key(self, entry: Any) -> None:
        key = _tomb_key(entry)
        stamp = int(entry["created_s"]) * 1000 + int(entry["created_ms"])
        with self._lock:
            if self._tombs.get(key, -1) >= stamp:
                return
            self._tombs[key] = stamp
            self._newest_tomb_ms = max(self._newest_tomb_ms, stamp)
            if self._came_after(key, stamp):
                return
            self._fresh_tombs.add((key[2], fmt.key_bytes(entry)))
            lo, hi = np.array([key[0]], dtype="<u8"), np.array([key[1]], dtype="<u8")
            kind, shard = key[2:]
            number = self._table.find(lo, hi, kind, shard)
            if number[0] >= 0:
                self._note_removed(self._table.remove(number))
            copies = (self._spares["key_lo"] == lo[0]) & (self._spares["key_hi"] == hi[0])
            copies &= (self._spares["kind"] == kind) & (self._spares["shard"] == shard)
            self._spares = self._spares[~copies]

    def _insert(self, writer: bytes, entries: NDArray[Any]) -> None:
        if not len(entries):
            return
        numbers, inverse = np.unique(entries["segment"], return_inverse=True)
        owners = [self._segments.need(writer, int(number)) for number in numbers]
        local = np.array([owner.local for owner in owners], dtype=np.uint32)
        alive = np.array([not (o.gone or o.buried) for o in owners], dtype=np.bool_)
        rows = np.zeros(len(entries), dtype=ROW)
        for name in ("key_lo", "key_hi", "page", "length", "kind", "shard", "cls", "depth"):
            rows[name] = entries[name]
        rows["segment"] = local[inverse]
        rows["seen_s"] = entries["created_s"]
        rows["flags"] = np.minimum(entries["generation"], 127)
        approximate = (entries["flags"] & fmt.FLAG_APPROXIMATE) != 0
        rows["flags"][approximate] |= APPROXIMATE_BIT
        keep = alive[inverse] & ~self.buried(entries)
        whole = bool(keep.all())
        fresh, entries = (rows, entries) if whole else (rows[keep], entries[keep])
        with self._lock:
            self._remember(entries)
            added = self._table.insert(fresh)
            if not added.all():
                self._keep_spares(fresh[~added])

    def _remember(self, entries: NDArray[Any]) -> None:
        self._recent.append(entries[-RECENT:])
        if len(self._recent) > 64 or len(self._recent[-1]) == RECENT:
            self._recent = [np.concatenate(self._recent)[-RECENT:]]

    def _came_after(self, key: tuple[int, int, int, int], stamp: int) -> bool:
        """Whether a record that is here was stored after a tombstone that is only read now."""
        for entries in self._recent:
            for entry in entries[entries["key_lo"] == key[0]]:
                written = int(entry["created_s"]) * 1000 + int(entry["created_ms"])
                if written > stamp and _tomb_key(entry) == key:
                    return True
        return False

    def _keep_spares(self, rows: NDArray[Any]) -> None:
        """Remember further copies; what a snapshot repeats is no copy but the record itself."""
        numbers = self._table.find_rows(rows)
        known = self._table.take(numbers)
        places = _place(rows)
        other = (places != _place(known)) & ~np.isin(places, _place(self._spares))
        self._spares = np.concatenate((self._spares, rows[other]))

    def _without_replaced(self, removed: NDArray[Any]) -> NDArray[Any]:
        """Put further copies of removed rows in their place; returns the rows that had none."""
        if not len(self._spares) or not len(removed):
            return removed
        self._spares = self._spares[~self._table.insert(self._spares)]
        lost = [
            self._table.find(
                row["key_lo"], row["key_hi"], int(row["kind"][0]), int(row["shard"][0])
            )
            < 0
            for row in removed.reshape(-1, 1)
        ]
        return removed[np.concatenate(lost)]

    def _note_removed(self, rows: NDArray[Any]) -> None:
        for row in rows:
            key = int(row["key_lo"]).to_bytes(8, "little") + int(row["key_hi"]).to_bytes(
                8, "little"
            )
            self._removed.append((key, int(row["kind"]), int(row["depth"])))

    @property
    def nbytes(self) -> int:
        """Memory of the table and of what stands beside it."""
        with self._lock:
            return self._table.nbytes + self._spares.nbytes

    def __len__(self) -> int:
        return len(self._table)

    @property
    def duplicates(self) -> int:
        """Further copies of records, stored by two processes at the same time."""
        return len(self._spares)


def aged(rows: NDArray[Any], now_s: int, classes: Iterable[RetentionClass]) -> NDArray[np.bool_]:
    """Rows whose last mark of use is an eighth of their class's lifetime old, or older."""
    result = np.zeros(len(rows), dtype=np.bool_)
    for policy in classes:
        if policy.ttl_s is not None:
            old = now_s - rows["seen_s"].astype(np.int64) >= policy.ttl_s / 8
            result |= (rows["cls"] == policy.code) & old
    return result


def _place(rows: NDArray[Any]) -> NDArray[Any]:
    return rows["segment"].astype(np.uint64) << np.uint64(32) | rows["page"].astype(np.uint64)


def _flagged(entries: NDArray[Any], flag: int) -> NDArray[Any]:
    return entries[(entries["flags"] & flag) != 0]


def _tomb_key(entry: Any) -> tuple[int, int, int, int]:
    return int(entry["key_lo"]), int(entry["key_hi"]), int(entry["kind"]), int(entry["shard"])
