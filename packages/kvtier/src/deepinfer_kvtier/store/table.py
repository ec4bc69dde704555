"""Index of the directory tier in memory: dense 40-byte rows plus an open-addressing table.

About 50 bytes a record, where a dict of Python objects takes 240. All operations work on whole
batches.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.quality import NO_ROW

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
