"""Records in host memory. Those of one size lie in numbered slots of one mapping, in large pages if
it can be; slots of a batch are handed out in ascending order.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.base.values import APPROXIMATE_BIT, GENERATION_BITS, KIND_CODES
from deepinfer_kvtier.host.eviction import EvictionPolicy, GuardedPolicy, Lru, Use
from deepinfer_kvtier.host.policies import policy_name

_MAP_NORESERVE = 0x4000  # Linux; the mapping is as large as the tier, used is what was touched


class Slab:
    """`count` slots of `nbytes` bytes. Not thread-safe: the host tier holds its lock.

    rows: uint8 [count, nbytes], all slots.
    warm: free slots that hold memory; the tier counts them as used until they are released.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.count = count
        self.rows: NDArray[np.uint8]
        self._memory: mmap.mmap | None = None
        if nbytes * count:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, nbytes * count, flags=flags)
            with contextlib.suppress(OSError):  # a kernel without large pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            flat: NDArray[Any] = np.frombuffer(self._memory, dtype=np.uint8)
            self.rows = flat.reshape(count, nbytes)
        else:
            self.rows = np.zeros((count, nbytes), dtype=np.uint8)
        self.warm: list[int] = []
        self._cold: list[int] = []
        self._touched = 0

    @property
    def live(self) -> int:
        """Slots that are handed out."""
        return self._touched - len(self.warm) - len(self._cold)

    def take_warm(self) -> int:
        """A free slot that holds memory already."""
        return self.warm.pop()

    def take_cold(self) -> int | None:
        """A free slot without memory; None when every slot is handed out or warm."""
        if self._cold:
            return self._cold.pop()
        if self._touched < self.count:
            self._touched += 1
            return self._touched - 1
        return None

    def give(self, slot: int) -> None:
        """Take a slot back; its memory is kept for the next record."""
        self.warm.append(slot)

    def release_warm(self) -> None:
        """Give the memory of one free slot back to the system."""
        slot = self.warm.pop()
        self._cold.append(slot)
        start = -(-slot * self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (slot + 1) * self.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        if self._memory is not None and end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def row(self, slot: int) -> NDArray[np.uint8]:
        """Bytes of one slot, uint8 [nbytes]."""
        return self.rows[slot]


def gather(slab: Slab, slots: NDArray[np.int64], target: NDArray[np.uint8]) -> None:
    """Copy slots into the rows of `target`, uint8 [len(slots), nbytes]."""
    if native.routines is not None:
        native.routines.copy_rows(slab.rows, target, slots, False)
        return
    for i, slot in enumerate(slots.tolist()):
        target[i] = slab.rows[slot]


def scatter(source: NDArray[np.uint8], slab: Slab, slots: NDArray[np.int64]) -> None:
    """Copy the rows of `source`, uint8 [len(slots), nbytes], into slots."""
    if native.routines is not None:
        native.routines.copy_rows(source, slab.rows, slots, True)
        return
    for i, slot in enumerate(slots.tolist()):
        slab.rows[slot] = source[i]


@dataclass(slots=True, eq=False)
class HostRecord:
    """One record in memory. `pins` counts leases, running copies and the write queue.

    marks: approximate bit and replay generation, as in rows of the index.
    loose: removed while pinned; the last pin gives the memory back.
    """

    kind: int
    digest: bytes
    parent: bytes
    depth: int
    data: NDArray[np.uint8]
    marks: int
    checksum: bytes | None = None
    slot: int = -1  # of `data` in the slab of its size
    pins: int = 0
    touched: float = 0.0
    loose: bool = False

    @property
    def approximate(self) -> bool:
        """Whether it was computed from windows that bounded replay had rebuilt."""
        return bool(self.marks & APPROXIMATE_BIT)

    @property
    def generation(self) -> int:
        """How many bounded replays lie behind it."""
        return self.marks & GENERATION_BITS


_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]
VERIFY_EVERY = 64
_EMPTY_SLOTS = 1 << 20  # records of no bytes take no room, only names


class HostTier:
    """Records by digest, bounded by `capacity_bytes`; state slots by a share of it and by age.

    policy: decides which block leaves; of state slots it is the least recently used.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        state_share: float,
        state_ttl_s: float,
        clock: Clock,
        policy: EvictionPolicy,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._state_capacity = int(capacity_bytes * state_share)
        self._state_ttl_s = state_ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._records: tuple[dict[bytes, HostRecord], ...] = ({}, {})
        self._order = tuple(map(GuardedPolicy, (policy, Lru()), self._records))
        self._slabs: dict[int, Slab] = {}
        # Slots of arrays that were taken and not published yet, by the identity of the array.
        self._taken: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self._spare_bytes = 0
        self._loose_bytes = 0  # taken, or removed while pinned
        self._bytes = [0, 0]
        self._gets = 0
        self._changes: list[tuple[bool, HostRecord]] = []
        self.counts = dict.fromkeys(
            ("evicted", "evicted_states", "expired", "dropped", "damaged", "corrupt", "no_room"), 0
        )

    # -- finding

    def pin_all(self, kind: int, digests: Sequence[bytes]) -> list[HostRecord | None]:
        """The record of each digest, pinned; None where one is not here."""
        with self._lock:
            found = list(map(self._records[kind].get, digests))
            for record in found:
                if record is not None:
                    record.pins += 1
            return found

    def pin(self, kind: int, digest: bytes) -> HostRecord | None:
        """One record, pinned; None when it is not here."""
        with self._lock:
            record = self._records[kind].get(digest)
            if record is not None:
                record.pins += 1
            return record

    def pin_again(self, record: HostRecord) -> None:
        """One more pin on a record that is pinned already."""
        with self._lock:
            record.pins += 1

    def peek(self, kind: int, digest: bytes) -> HostRecord | None:
        """One record without a pin: its fields may be read, its bytes may not."""
        with self._lock:
            return self._records[kind].get(digest)

    def contains(self, kind: int, digest: bytes) -> bool:
        """Whether the record is here now."""
        with self._lock:
            return digest in self._records[kind]

    def unpin(self, records: Iterable[HostRecord]) -> None:
        """Give pins back."""
        with self._lock:
            for record in records:
                record.pins -= 1
                if record.loose and record.pins == 0:
                    self._loose_bytes -= record.data.nbytes
                    self._keep_spare(record.data.nbytes, record.slot)

    def used(self, use: Use) -> None:
        """A request asked for a chain of blocks; what of it is here counts as used."""
        if self.capacity_bytes:
            with self._lock:
                self._order[_BLOCK].used(use)

    def used_state(self, digest: bytes) -> None:
        """A request found this state slot, here or elsewhere."""
        now = self._clock.monotonic()
        with self._lock:
            record = self._records[_STATE].get(digest)
            if record is not None:
                record.touched = now
                self._order[_STATE].used(Use((digest,), 1, 1, 1, now))

    def damaged(self, records: Sequence[HostRecord]) -> list[HostRecord]:
        """Those of these records, just copied, that the sample of every 64th read finds changed."""
        first = self._gets
        self._gets = first + len(records)
        next_check = -(first + 1) % VERIFY_EVERY
        return [
            record
            for record in records[next_check::VERIFY_EVERY]
            if record.checksum is not None and not self._intact(record)
        ]

    # -- taking and giving room

    def take_many(self, kind: int, nbytes: int, count: int) -> list[NDArray[np.uint8]]:
        """Arrays for up to `count` records, in order of their slots; fewer where only pinned
        records could make room."""
        with self._lock:
            slots: list[int] = []
            while len(slots) < count:
                slot = self._take(kind, nbytes)
                if slot is None:
                    break
                slots.append(slot)
                self._loose_bytes += nbytes
            slots.sort()
            arrays = [self._slabs[nbytes].row(slot) for slot in slots]
            for array, slot in zip(arrays, slots, strict=True):
                self._taken[id(array)] = array, slot
            return arrays

    def give(self, data: NDArray[np.uint8]) -> None:
        """Return an array that was taken and not published."""
        with self._lock:
            self._give(data)

    def fill(self, arrays: Sequence[NDArray[np.uint8]], source: NDArray[np.uint8]) -> None:
        """Copy the rows of `source`, uint8 [n, nbytes], into arrays of one `take_many`."""
        if arrays:
            with self._lock:
                slots = np.array([self._taken[id(array)][1] for array in arrays], dtype=np.int64)
                slab = self._slabs[arrays[0].nbytes]
            scatter(source, slab, slots)

    def copy_out(
        self,
        records: Sequence[HostRecord],
        target: NDArray[np.uint8],
        slots: NDArray[np.int64] | None = None,
    ) -> None:
        """Bytes of pinned records of one size into the rows of `target`, uint8 [n, nbytes].

        slots: those of the records, where they are known already.
        """
        if len(records):
            if slots is None:
                slots = np.array([record.slot for record in records], dtype=np.int64)
            gather(self._slabs[records[0].data.nbytes], slots, target)

    def publish_all(self, records: Sequence[HostRecord]) -> list[HostRecord]:
        """Make records of one kind findable, each with one more pin for the caller.

        records: those of a chain first to last.
        returns: those that are findable now: equal ones that were here before, if any; the arrays
                 of the new ones have been given back then.
        """
        now = self._clock.monotonic()
        found: list[HostRecord] = []
        came: list[HostRecord] = []
        with self._lock:
            for record in records:
                table = self._records[record.kind]
                existing = table.get(record.digest)
                if existing is not None:
                    self._give(record.data)
                    existing.pins += 1
                    found.append(existing)
                    continue
                _, record.slot = self._taken.pop(id(record.data))
                nbytes = record.data.nbytes
                self._loose_bytes -= nbytes
                self._bytes[record.kind] += nbytes
                record.touched = now
                record.pins += 1
                table[record.digest] = record
                found.append(record)
                came.append(record)
            if came:
                names, parents = [r.digest for r in came], [r.parent for r in came]
                self._order[came[0].kind].entered(names, parents, now)
                self._changes.extend([(True, record) for record in came])
        return found

    def remove(self, kind: int, digest: bytes, *, damaged: bool = False) -> HostRecord | None:
        """Forget a record now; memory that is pinned lives on until its holder is done."""
        with self._lock:
            record = self._records[kind].pop(digest, None)
            if record is not None:
                self._order[kind].left(digest)
                self.counts["damaged" if damaged else "dropped"] += 1
                self._changes.append((False, record))
                self._bytes[kind] -= record.data.nbytes
                if record.pins == 0:
                    self._keep_spare(record.data.nbytes, record.slot)
                else:
                    record.loose = True
                    self._loose_bytes += record.data.nbytes
            return record

    def remove_keys(self, keys: set[tuple[int, bytes]]) -> None:
        """Forget every record named by kind and the first 16 bytes of its digest."""
        for kind, table in enumerate(self._records):
            with self._lock:
                doomed = [digest for digest in table if (kind, digest[:16]) in keys]
            for digest in doomed:
                self.remove(kind, digest)

    def expire(self) -> None:
        """Drop state slots that nobody used for the time to live."""
        horizon = self._clock.monotonic() - self._state_ttl_s
        with self._lock:
            old = [r for r in self._records[_STATE].values() if r.touched < horizon and not r.pins]
            for record in old:
                self._evict(record)
                self.counts["expired"] += 1

    def drain_changes(self) -> list[tuple[bool, HostRecord]]:
        """(whether it came, record) for all that came or left since the last call, in order."""
        if not self._changes:
            return []
        with self._lock:
            changes, self._changes = self._changes, []
            return changes

    def usage(self) -> dict[str, int]:
        """Records and bytes, plus counters."""
        with self._lock:
            return {
                "capacity_bytes": self.capacity_bytes,
                "blocks": len(self._records[_BLOCK]),
                "states": len(self._records[_STATE]),
                "block_bytes": self._bytes[_BLOCK],
                "state_bytes": self._bytes[_STATE],
                "policy_failures": sum(order.failures for order in self._order),
                **self.counts,
            }

    @property
    def policy_name(self) -> str:
        """The policy that decides about blocks now."""
        return policy_name(self._order[_BLOCK].policy)

    def audit(self) -> None:
        """Raise AssertionError where the books are wrong."""
        with self._lock:
            for kind, table in enumerate(self._records):
                held = sum(record.data.nbytes for record in table.values())
                assert held == self._bytes[kind], "bytes of records and the counter disagree"
                assert all(record.pins >= 0 for record in table.values()), "a pin was given twice"
            spare = sum(size * len(slab.warm) for size, slab in self._slabs.items())
            assert spare == self._spare_bytes, "spare slots and their counter disagree"
            assert self._total() <= self.capacity_bytes, "over capacity"
            live = sum(slab.live * size for size, slab in self._slabs.items())
            assert live == sum(self._bytes) + self._loose_bytes, "slots and records disagree"

    def pins(self) -> int:
        """Pins of all findable records, for leak tests."""
        with self._lock:
            return sum(record.pins for table in self._records for record in table.values())

    def _intact(self, record: HostRecord) -> bool:
        if xxhash.xxh3_128_digest(record.data.data) == record.checksum:
            return True
        self.counts["corrupt"] += 1
        return False

    # -- inside the lock

    def _take(self, kind: int, nbytes: int) -> int | None:
        if nbytes > self.capacity_bytes:
            self.counts["no_room"] += 1
            return None
        if kind == _STATE:
            limit = max(self._state_capacity, nbytes)
            if not self._shrink(_STATE, limit - nbytes):
                self.counts["no_room"] += 1
                return None
        slab = self._slabs.get(nbytes)
        if slab is None:
            count = self.capacity_bytes // nbytes if nbytes else _EMPTY_SLOTS
            slab = self._slabs[nbytes] = Slab(nbytes, count)
        if not slab.warm:
            self._make_room(slab)
        if slab.warm:
            self._spare_bytes -= nbytes
            return slab.take_warm()
        slot = slab.take_cold() if self._total() + nbytes <= self.capacity_bytes else None
        if slot is None:
            self.counts["no_room"] += 1
        return slot

    def _total(self) -> int:
        return sum(self._bytes) + self._spare_bytes + self._loose_bytes

    def _make_room(self, slab: Slab) -> None:
        """Evict until this slab has a free slot with memory or may use one without."""
        while self._total() + slab.nbytes > self.capacity_bytes and not slab.warm:
            if self._spare_bytes:
                other = next(s for s in self._slabs.values() if s.warm and s.nbytes)
                other.release_warm()
                self._spare_bytes -= other.nbytes
                if not other.live and not other.warm:
                    del self._slabs[other.nbytes]
            elif not (self._evict_one(_BLOCK) or self._evict_one(_STATE)):
                return

    def _shrink(self, kind: int, limit: int) -> bool:
        while self._bytes[kind] > limit:
            if not self._evict_one(kind):
                return False
        return True

    def _evict_one(self, kind: int) -> bool:
        victim = self._order[kind].victim()
        if victim is None:
            return False
        self._evict(self._records[kind][victim])
        self.counts["evicted" if kind == _BLOCK else "evicted_states"] += 1
        return True

    def _evict(self, record: HostRecord) -> None:
        del self._records[record.kind][record.digest]
        self._order[record.kind].left(record.digest)
        self._bytes[record.kind] -= record.data.nbytes
        self._keep_spare(record.data.nbytes, record.slot)
        self._changes.append((False, record))

    def _give(self, data: NDArray[np.uint8]) -> None:
        _, slot = self._taken.pop(id(data))
        self._loose_bytes -= data.nbytes
        self._keep_spare(data.nbytes, slot)

    def _keep_spare(self, nbytes: int, slot: int) -> None:
        self._slabs[nbytes].give(slot)
        self._spare_bytes += nbytes
