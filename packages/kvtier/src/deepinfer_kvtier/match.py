"""What a lookup found, and the lease that keeps it there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.clock import Clock
from deepinfer_kvtier.memory.host import HostRecord, HostTier
from deepinfer_kvtier.records import Span, StateHit
from deepinfer_kvtier.store.segments import SegmentSet


@dataclass(slots=True, eq=False)
class Lease:
    """Pins of one match: nothing of it is freed or overwritten before `expires_at` (seconds)."""

    expires_at: float
    records: list[HostRecord] = field(default_factory=list[HostRecord])
    segments: list[int] = field(default_factory=list[int])
    active: bool = True
    holds: int = 0


class LeaseBook:
    """All leases of one cache; expired ones are collected whenever a new one is made."""

    def __init__(self, host: HostTier, segments: SegmentSet | None, clock: Clock) -> None:
        self._host = host
        self._segments = segments
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: set[Lease] = set()
        self.expired = 0

    def grant(self, records: list[HostRecord], segments: list[int], seconds: float) -> Lease:
        """Take over pins that are held already."""
        self.expire()
        lease = Lease(self._clock.monotonic() + seconds, records, segments)
        with self._lock:
            self._leases.add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Give the pins back; a second call does nothing."""
        with self._lock:
            self._leases.discard(lease)
            if not lease.active:
                return
            lease.active = False
            if lease.holds:
                return  # the last load that uses the pins gives them back
        self._unpin(lease)

    def hold(self, lease: Lease) -> bool:
        """Keep the pins until `unhold`, even past their time; False when they are gone already."""
        with self._lock:
            if lease.active:
                lease.holds += 1
            return lease.active

    def unhold(self, lease: Lease) -> None:
        """Give one `hold` back."""
        with self._lock:
            lease.holds -= 1
            if lease.active or lease.holds:
                return
        self._unpin(lease)

    def _unpin(self, lease: Lease) -> None:
        self._host.unpin(lease.records)
        if self._segments is not None:
            for local in lease.segments:
                self._segments.release(local)

    def renew(self, lease: Lease, seconds: float) -> bool:
        """Extend a lease; False when it has been released or has expired."""
        self.expire()
        with self._lock:
            if lease.active:
                lease.expires_at = self._clock.monotonic() + seconds
            return lease.active

    def expire(self) -> None:
        """Release what is over its time."""
        now = self._clock.monotonic()
        with self._lock:
            late = [lease for lease in self._leases if lease.expires_at <= now]
        for lease in late:
            self.expired += 1
            self.release(lease)

    def release_all(self) -> None:
        """At the end of the cache."""
        with self._lock:
            leases = list(self._leases)
        for lease in leases:
            self.release(lease)

    def abandon(self) -> None:
        """In a forked child: all leases are its parent's, and so may be who holds the lock."""
        self._lock = threading.Lock()
        for lease in self._leases:
            lease.active = False
        self._leases.clear()

    def __len__(self) -> int:
        return len(self._leases)


@dataclass(slots=True, eq=False)
class Match:
    """Longest reusable prefix of one prompt, leased.

    n_blocks, n_tokens: the hit. With "state" wanted it ends at the deepest boundary for which all
                        blocks and the state slot are present (exact); without, it is the blocks
                        alone.
    block_prefix:       leading blocks present, with or without state: what bounded replay may use.
    state:              deepest state slot at or before `block_prefix`; None when there is none.
    spans:              where the `n_blocks` blocks lie, first to last.
    digests:            all whole blocks of the prompt (32 bytes each), hit or not: `put` wants
                        these.
    approximate, replay_generation: of the hit, its state included.
    block_approximate, block_generation: of `block_prefix`, without state.
    """

    n_blocks: int
    n_tokens: int
    block_prefix: int
    state: StateHit | None
    spans: tuple[Span, ...]
    digests: tuple[bytes, ...]
    approximate: bool
    replay_generation: int
    block_approximate: bool
    block_generation: int
    prompt_tokens: int
    lease: Lease
    lease_s: float
    _book: LeaseBook = field(repr=False)
    _names: tuple[str, ...] = field(repr=False)
    _where: NDArray[np.uint8] = field(repr=False)
    _marks: NDArray[np.uint8] = field(repr=False)
    _records: tuple[HostRecord | None, ...] = field(repr=False)
    _state_record: HostRecord | None = field(repr=False)
    _rows: NDArray[Any] | None = field(repr=False)
    _state_row: NDArray[Any] | None = field(repr=False)
    _slots: NDArray[np.int64] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Give the lease back; harmless when it is over already."""
        self._book.release(self.lease)

    def renew(self, lease_s: float | None = None) -> bool:
        """Extend the lease from now; False when it is over: match again."""
        return self._book.renew(self.lease, self.lease_s if lease_s is None else lease_s)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def tiers(self) -> Sequence[str]:
        """Tier of each block of `block_prefix`."""
        return tuple(self._names[number] for number in self._where.tolist())

    def only_tier(self, blocks: range) -> str | None:
        """The tier that all of these blocks are in; None when there are several or no blocks."""
        where = self._where[blocks.start : blocks.stop]
        if not len(where) or (where != where[0]).any():
            return None
        return self._names[int(where[0])]

    def marks(self) -> NDArray[np.uint8]:
        """For each block of `block_prefix`: 0x80 when approximate, plus the replay generation."""
        return self._marks

    def records(self) -> tuple[HostRecord | None, ...]:
        """Host records of `block_prefix`; only those still pinned may be read."""
        return self._records

    def slots(self) -> NDArray[np.int64] | None:
        """Host slots of `block_prefix` when all of it lies in host memory; None otherwise."""
        if self._slots is None and not self._where.any():
            slots = [record.slot for record in self._records if record is not None]
            self._slots = np.array(slots, dtype=np.int64)
        return self._slots

    def views(self) -> list[memoryview | None]:
        """Blocks of `block_prefix` in place, without a copy: read-only, None outside host memory.

        Use them only while the lease lasts: hold it with `renew` and give it back afterwards.
        returns: nothing but None once the lease is over.
        """
        if not self.lease.active:
            return [None] * len(self._records)
        return [None if r is None else r.data.data.toreadonly() for r in self._records]

    def state_record(self) -> HostRecord | None:
        """Host record of the state slot; only while it is pinned it may be read."""
        return self._state_record

    def rows(self) -> NDArray[Any] | None:
        """Directory rows of `block_prefix` while the lease pins their segments; None otherwise."""
        return self._rows if self.lease.active else None

    def state_row(self) -> NDArray[Any] | None:
        """Directory row (length 1) of the state slot while the lease pins its segment."""
        return self._state_row if self.lease.active else None


def spans_of(where: NDArray[np.uint8], names: Sequence[str], block_bytes: int) -> tuple[Span, ...]:
    """Runs of blocks in one tier; where: for each block, the index of its tier in `names`."""
    if not len(where):
        return ()
    starts = [0, *(np.flatnonzero(np.diff(where)) + 1).tolist()]
    ends = [*starts[1:], len(where)]
    return tuple(
        Span(names[int(where[start])], start, end - start, (end - start) * block_bytes)
        for start, end in zip(starts, ends, strict=True)
    )
