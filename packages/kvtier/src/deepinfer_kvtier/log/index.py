"""Index of the log in memory: one table fed by the logs of all writers, tombstones included."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.config import RetentionClass
from deepinfer_kvtier.base.values import APPROXIMATE_BIT, NO_ROW
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.segments import Segment, SegmentSet

ROW: Final = np.dtype(
    [
        ("key_lo", "<u8"),
        ("key_hi", "<u8"),
        ("segment", "<u4"),
        ("page", "<u4"),
        ("length", "<u4"),
        ("kind", "u1"),
        ("shard", "u1"),
        ("cls", "u1"),
        ("flags", "u1"),  # bit 7: approximate; low bits: replay generation, saturating at 127
        ("seen_s", "<u4"),
        ("depth", "<u4"),
    ]
)

_EMPTY: Final = np.uint32(0xFFFFFFFF)
_DEAD: Final = np.uint32(0xFFFFFFFE)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_MAX_LOAD: Final = 0.6
_PROBE: Final = 8  # slots looked at together by those that did not end at their first
_STEPS: Final = np.arange(_PROBE)
_CHUNK: Final = 1 << 16  # rows placed together: bounds the memory of their windows


class EntryTable:
    """Rows by (16-byte key, kind, shard); not thread-safe, the owner holds the lock."""

    def __init__(self, capacity: int = 1024) -> None:
        self._rows: NDArray[Any] = np.zeros(capacity, dtype=ROW)
        self._live: NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)
        self._hit: NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)  # since it came
        self._used = 0  # rows ever handed out; holes are in _free
        self._free: list[int] = []
        self._slots: NDArray[np.uint32] = np.full(_slots_for(capacity), _EMPTY, dtype=np.uint32)
        self._filled = 0  # slots that are not EMPTY

    def __len__(self) -> int:
        return self._used - len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self._rows.nbytes + self._live.nbytes + self._hit.nbytes + self._slots.nbytes

    def rows(self) -> NDArray[Any]:
        """A copy of all live rows."""
        return self._rows[: self._used][self._live[: self._used]]

    def find(
        self, key_lo: NDArray[Any], key_hi: NDArray[Any], kind: int, shard: int
    ) -> NDArray[Any]:
        """Row numbers (int64) of keys; -1 where there is none."""
        kinds = np.full(len(key_lo), kind, dtype=np.uint8)
        shards = np.full(len(key_lo), shard, dtype=np.uint8)
        return self._find(key_lo, key_hi, kinds, shards)

    def find_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """`find` for the keys of rows."""
        return self._find(rows["key_lo"], rows["key_hi"], rows["kind"], rows["shard"])

    def probe(
        self, key_lo: NDArray[Any], key_hi: NDArray[Any], kind: int, shard: int
    ) -> NDArray[Any]:
        """Copies of the rows of keys; `length` is NO_ROW where there is none."""
        numbers = self.find(key_lo, key_hi, kind, shard)
        rows = self.take(np.maximum(numbers, 0))
        rows["length"][numbers < 0] = NO_ROW
        return rows

    def take(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Copies of rows by number."""
        return self._rows[numbers]

    def insert(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Add rows; one whose key is there already (or earlier in the batch) is left out.

        returns: bool per row, True = added.
        """
        added = np.zeros(len(rows), dtype=np.bool_)
        if len(rows) == 0:
            return added
        fresh = np.flatnonzero(self.find_rows(rows) < 0)
        ordered = np.sort(rows["key_lo"][fresh])
        if (ordered[1:] == ordered[:-1]).any():
            identity = rows[fresh][["key_lo", "key_hi", "kind", "shard"]]
            _, first = np.unique(identity, return_index=True)
            fresh = fresh[np.sort(first)]
        if len(fresh):
            numbers = self._allocate(len(fresh))
            self._rows[numbers] = rows[fresh]
            self._live[numbers] = True
            self._hit[numbers] = False
            self._place(numbers)
            added[fresh] = True
        return added

    def touch(self, numbers: NDArray[Any], seen_s: NDArray[Any] | int) -> None:
        """Raise the time of the last use of rows; never lowers it."""
        found = self._rows["seen_s"]
        found[numbers] = np.maximum(found[numbers], np.asarray(seen_s, dtype=np.uint32))

    def newest_s(self) -> int:
        """Largest time of last use of the live rows; 0 without any."""
        used = slice(0, self._used)
        return int(self._rows["seen_s"][used].max(initial=0, where=self._live[used]))

    def mark_hit(self, numbers: NDArray[Any], hit: bool = True) -> None:
        """Note that rows were used since they came, or take that back."""
        self._hit[numbers] = hit

    def hit_rows(self) -> NDArray[Any]:
        """Copies of the rows that were used since they came."""
        used = slice(0, self._used)
        return self._rows[used][self._live[used] & self._hit[used]]

    def remove(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Take rows out and return copies of them."""
        numbers = np.unique(numbers)
        gone = self._rows[numbers]
        positions = self._slot_of(numbers)
        self._slots[positions] = _DEAD
        self._live[numbers] = False
        self._free.extend(int(n) for n in numbers)
        return gone

    def numbers_in_segment(self, segment: int) -> NDArray[Any]:
        """Row numbers of everything stored in one segment."""
        used = slice(0, self._used)
        return np.flatnonzero(self._live[used] & (self._rows["segment"][used] == segment))

    def audit(self) -> None:
        """Raise AssertionError unless every live row is found at itself and none else is."""
        live = np.flatnonzero(self._live[: self._used])
        rows = self._rows[live]
        found = self._find(rows["key_lo"], rows["key_hi"], rows["kind"], rows["shard"])
        assert np.array_equal(found, live), "a live row is not found by its own key"
        assert len(live) == len(self), "free list and live rows disagree"
        pointed = self._slots[self._slots < _DEAD]
        assert np.array_equal(np.sort(pointed), live), "slots point at rows that are not live"

    def _find(
        self, lo: NDArray[Any], hi: NDArray[Any], kind: NDArray[Any], shard: NDArray[Any]
    ) -> NDArray[Any]:
        result: NDArray[Any] = np.full(len(lo), -1, dtype=np.int64)
        if native.routines is not None:
            native.routines.find_rows(self._slots, self._rows, lo, hi, kind, shard, result)
            return result
        waiting = np.arange(len(lo))
        at = self._home(lo, kind, shard)
        lows, width = self._rows["key_lo"], 1  # most are where they should be
        while len(waiting):
            entry = self._slots[self._window(at, width)]
            real = entry < _DEAD
            number = np.where(real, entry, 0).astype(np.int64)
            line, column = np.nonzero(real & (lows[number] == lo[waiting, None]))
            found, asked = number[line, column], waiting[line]
            rows = self._rows[found]
            same = rows["key_hi"] == hi[asked]
            same &= (rows["kind"] == kind[asked]) & (rows["shard"] == shard[asked])
            result[asked[same]] = found[same]
            settled = (entry == _EMPTY).any(axis=1)
            settled[line[same]] = True
            waiting, at, width = waiting[~settled], at[~settled] + width, _PROBE
        return result

    def _window(self, at: NDArray[Any], width: int) -> NDArray[Any]:
        """Positions of `width` slots from each of `at` on, int64 [len(at), width]."""
        return (at[:, None] + _STEPS[:width]) & np.int64(len(self._slots) - 1)

    def _home(self, lo: NDArray[Any], kind: NDArray[Any], shard: NDArray[Any]) -> NDArray[Any]:
        # Keys of ours are keyed-hash output, hence uniform; others may not be. The product's high
        # bits depend on all bits of the key.
        twist = kind.astype(np.uint64) << np.uint64(8) | shard.astype(np.uint64)
        shift = np.uint64(65 - len(self._slots).bit_length())
        return (((lo ^ twist) * _MIX) >> shift).astype(np.int64)

    def _slot_of(self, numbers: NDArray[Any]) -> NDArray[Any]:
        rows = self._rows[numbers]
        at = self._home(rows["key_lo"], rows["kind"], rows["shard"])
        mask = np.int64(len(self._slots) - 1)
        result = np.zeros(len(numbers), dtype=np.int64)
        waiting = np.arange(len(numbers))
        while len(waiting):
            here = self._slots[at] == numbers[waiting].astype(np.uint32)
            result[waiting[here]] = at[here]
            waiting = waiting[~here]
            at = (at[~here] + 1) & mask
        return result

    def _allocate(self, count: int) -> NDArray[Any]:
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        new = count - len(reused)
        if self._used + new > len(self._rows):
            size = max(self._used + new, len(self._rows) * 5 // 4)
            self._rows = _grown(self._rows, size)
            self._live = _grown(self._live, size)
            self._hit = _grown(self._hit, size)
        numbers = np.array(reused + list(range(self._used, self._used + new)), dtype=np.int64)
        self._used += new
        return numbers

    def _place(self, numbers: NDArray[Any]) -> None:
        if self._filled + len(numbers) > len(self._slots) * _MAX_LOAD:
            self._slots = np.full(_slots_for(len(self)), _EMPTY, dtype=np.uint32)
            self._filled = 0
            numbers = np.flatnonzero(self._live[: self._used])
        for start in range(0, len(numbers), _CHUNK):
            self._place_some(numbers[start : start + _CHUNK])

    def _place_some(self, numbers: NDArray[Any]) -> None:
        """Each row to the first free slot from where it should be on."""
        rows = self._rows[numbers]
        at, width = self._home(rows["key_lo"], rows["kind"], rows["shard"]), 1
        wanted = numbers.astype(np.uint32)
        self._filled += len(wanted)
        while len(wanted):
            window = self._window(at, width)
            free = self._slots[window] == _EMPTY
            has_room = free.any(axis=1)
            spot = window[np.arange(len(window)), free.argmax(axis=1)]
            self._slots[spot[has_room]] = wanted[has_room]
            # Of several that want one slot, the one written last has it.
            lost = ~has_room | (self._slots[spot] != wanted)
            at = np.where(has_room, at, at + width)[lost]
            wanted, width = wanted[lost], _PROBE


def _slots_for(rows: int) -> int:
    """A power of two that holds `rows` and a tenth more below the load limit."""
    size = 64
    while size * _MAX_LOAD < rows * 1.1:
        size *= 2
    return size


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    bigger = np.zeros(size, dtype=array.dtype)
    bigger[: len(array)] = array
    return bigger


RECENT: Final = 1 << 15
"""Entries that are remembered with their times, for tombstones that are read after them."""


class LogIndex:
    """Where every record of a directory lies, as far as its logs have been read.

    All methods may be called from several threads; the lock is never held during I/O.

    linger_s: seconds for which records of a segment that another process has given up can still be
              found, because its file is still there: what one process has leased another one may
              be about to load. Such records count for nothing else.
    now_s:    monotonic time, later told by `pass_time`.
    """

    def __init__(self, segments: SegmentSet, *, linger_s: float = 0.0, now_s: float = 0.0) -> None:
        self._segments = segments
        self._grace_s = linger_s
        self._now_s = now_s
        self._in_grace: dict[int, float] = {}
        self._lock = threading.RLock()
        self._table = EntryTable()
        # Further copies of records in the table, written by other processes at the same time.
        self._duplicates: NDArray[Any] = np.zeros(0, dtype=ROW)
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
                self._tombstone_key(entry)
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
            linger = self._grace_s > 0 and known and not segment.tombstoned
            if linger:
                self._in_grace[segment.local] = self._now_s + self._grace_s
        segment.tombstoned = True
        if not linger and segment.local not in self._in_grace:
            self.forget_segment(segment)

    def pass_time(self, now_s: float) -> None:
        """Forget what has lingered long enough. now_s: monotonic seconds."""
        self._now_s = now_s
        for local, until_s in list(self._in_grace.items()):
            if now_s >= until_s:
                self.forget_segment(self._segments.get(local))

    def in_grace(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Rows whose segment is about to be deleted."""
        if not self._in_grace:
            return np.zeros(len(rows), dtype=np.bool_)
        with self._lock:
            return np.isin(rows["segment"], list(self._in_grace))

    def _apply_touches(self, touches: NDArray[Any]) -> None:
        with self._lock:
            for kind, shard in {(int(t["kind"]), int(t["shard"])) for t in touches}:
                some = touches[(touches["kind"] == kind) & (touches["shard"] == shard)]
                found = self._table.find(some["key_lo"], some["key_hi"], kind, shard)
                there = found >= 0
                self._table.touch(found[there], some["created_s"][there])
                self._table.mark_hit(found[there])

    def tombstone(
        self, kind: int, shard: int, digests: Sequence[bytes], wall_ms: int
    ) -> tuple[int, NDArray[Any]]:
        """Hide everything stored for digests until now; returns how many were here, and the
        tombstones to log."""
        lo, hi = fmt.key_columns(list(digests))
        with self._lock:
            numbers = self._table.find(lo, hi, kind, shard)
            rows = self._table.take(numbers[numbers >= 0])
            copies = self._duplicates[np.isin(self._duplicates["key_lo"], lo)]
            stamp = max(wall_ms, self._last_tomb_ms + 1)
            stamp = self._last_tomb_ms = self._no_earlier(stamp, np.concatenate((rows, copies)))
        entries = np.zeros(len(digests), dtype=fmt.ENTRY)
        entries["key_lo"], entries["key_hi"] = lo, hi
        entries["kind"], entries["shard"] = kind, shard
        entries["flags"] = fmt.FLAG_TOMB_KEY
        entries["created_s"], entries["created_ms"] = stamp // 1000, stamp % 1000
        with self._lock:
            for entry in entries:
                self._tombstone_key(entry)
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
            self._in_grace.pop(segment.local, None)
            self._duplicates = self._duplicates[self._duplicates["segment"] != segment.local]
            self._note_removed(self._without_replaced(rows))
        self._segments.mark_gone(segment)
        return rows

    def unlearn(self, segment: Segment) -> None:
        """Let go of the rows of a segment that may well be there: to be asked for again."""
        with self._lock:
            self._table.remove(self._table.numbers_in_segment(segment.local))
            self._duplicates = self._duplicates[self._duplicates["segment"] != segment.local]

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
            return rows[~self.in_grace(rows)] if self._in_grace else rows

    def stored_rows(self) -> NDArray[Any]:
        """A copy of the rows of everything stored, further copies of a record included."""
        with self._lock:
            return np.concatenate((self.rows(), self._duplicates))

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

    def tombstoned(self, entries: NDArray[Any]) -> NDArray[np.bool_]:
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

    def _tombstone_key(self, entry: Any) -> None:
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
            copies = (self._duplicates["key_lo"] == lo[0]) & (self._duplicates["key_hi"] == hi[0])
            copies &= (self._duplicates["kind"] == kind) & (self._duplicates["shard"] == shard)
            self._duplicates = self._duplicates[~copies]

    def _insert(self, writer: bytes, entries: NDArray[Any]) -> None:
        if not len(entries):
            return
        numbers, inverse = np.unique(entries["segment"], return_inverse=True)
        owners = [self._segments.need(writer, int(number)) for number in numbers]
        local = np.array([owner.local for owner in owners], dtype=np.uint32)
        alive = np.array([not (o.gone or o.tombstoned) for o in owners], dtype=np.bool_)
        rows = np.zeros(len(entries), dtype=ROW)
        for name in ("key_lo", "key_hi", "page", "length", "kind", "shard", "cls", "depth"):
            rows[name] = entries[name]
        rows["segment"] = local[inverse]
        rows["seen_s"] = entries["created_s"]
        rows["flags"] = np.minimum(entries["generation"], 127)
        approximate = (entries["flags"] & fmt.FLAG_APPROXIMATE) != 0
        rows["flags"][approximate] |= APPROXIMATE_BIT
        keep = alive[inverse] & ~self.tombstoned(entries)
        whole = bool(keep.all())
        fresh, entries = (rows, entries) if whole else (rows[keep], entries[keep])
        with self._lock:
            self._remember(entries)
            added = self._table.insert(fresh)
            if not added.all():
                self._keep_duplicates(fresh[~added])

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

    def _keep_duplicates(self, rows: NDArray[Any]) -> None:
        """Remember further copies; what a snapshot repeats is no copy but the record itself."""
        numbers = self._table.find_rows(rows)
        known = self._table.take(numbers)
        places = _place(rows)
        other = (places != _place(known)) & ~np.isin(places, _place(self._duplicates))
        self._duplicates = np.concatenate((self._duplicates, rows[other]))

    def _without_replaced(self, removed: NDArray[Any]) -> NDArray[Any]:
        """Put further copies of removed rows in their place; returns the rows that had none."""
        if not len(self._duplicates) or not len(removed):
            return removed
        self._duplicates = self._duplicates[~self._table.insert(self._duplicates)]
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
            return self._table.nbytes + self._duplicates.nbytes

    def newest_s(self) -> int:
        """Newest time of any record; 0 without records."""
        with self._lock:
            return self._table.newest_s()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def duplicates(self) -> int:
        """Further copies of records, stored by two processes at the same time."""
        return len(self._duplicates)


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
