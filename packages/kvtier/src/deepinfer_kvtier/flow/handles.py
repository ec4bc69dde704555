"""What a caller holds: matches with their leases, tickets of puts and loads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.base.values import LoadResult, Part, Span, StateHit, Status
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.log.segments import SegmentSet


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
    root:               of the namespace it belongs to: others refuse it.
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
    root: bytes = field(repr=False)
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
        where = self._where[blocks.start : blocks.stop].tobytes()
        if not where or where.count(where[0]) < len(where):
            return None
        return self._names[where[0]]

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
    if not where.any():  # all in the fastest one
        return (Span(names[0], 0, len(where), len(where) * block_bytes),)
    starts = [0, *(np.flatnonzero(np.diff(where)) + 1).tolist()]
    ends = [*starts[1:], len(where)]
    return tuple(
        Span(names[int(where[start])], start, end - start, (end - start) * block_bytes)
        for start, end in zip(starts, ends, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """Parts that arrive together.

    ranges: (offset, size) in bytes of what is copied, neighbouring parts joined.
    """

    parts: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


def plan_stages(parts: Sequence[Part], patterns: Sequence[str]) -> tuple[Stage, ...]:
    """One stage for each pattern, and one for the parts that none names.

    patterns: part names, or shell patterns such as "L2.*", or one of them; a part belongs to the
              first that fits.
    raises:   ConfigError for a pattern that fits no part.
    """
    left = list(range(len(parts)))
    stages: list[Stage] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not any(fnmatchcase(part.name, pattern) for part in parts):
            raise ConfigError(
                f"no part of this layout is named {pattern!r}:"
                f" it has {', '.join(part.name for part in parts)}"
            )
        chosen = [i for i in left if fnmatchcase(parts[i].name, pattern)]
        left = [i for i in left if i not in chosen]
        if chosen:
            stages.append(_stage(parts, chosen))
    if left:
        stages.append(_stage(parts, left))
    return tuple(stages)


def _stage(parts: Sequence[Part], chosen: list[int]) -> Stage:
    ranges: list[tuple[int, int]] = []
    for i in chosen:
        offset, size = parts[i].offset, parts[i].size
        if ranges and ranges[-1][0] + ranges[-1][1] == offset:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + size
        else:
            ranges.append((offset, size))
    return Stage(tuple(chosen), tuple(ranges))


class Arrivals:
    """Which parts of which blocks of one load are there. Thread-safe."""

    def __init__(
        self,
        parts: Sequence[Part],
        blocks: int,
        stages: Sequence[Stage],
        deliver: Callable[[Sequence[tuple[int, int]] | None], None] | None = None,
    ) -> None:
        self._deliver = deliver
        self.parts = parts
        self.stages = stages
        self._blocks = blocks
        self._changed = threading.Condition()
        self._there: list[set[int]] = [set() for _ in parts]
        self._ended = False

    def arrive(self, stage: Stage, blocks: Sequence[int]) -> None:
        """These blocks have the parts of a stage, bytes and checksum."""
        if self._deliver is not None and blocks:
            self._deliver(stage.ranges)
        with self._changed:
            for part in stage.parts:
                self._there[part].update(blocks)
            self._changed.notify_all()

    def whole(self, block: int) -> bool:
        """Whether every part of a block is there."""
        with self._changed:
            return all(block in there for there in self._there)

    def ready(self, pattern: str) -> bool:
        """Whether the parts that fit a pattern are there in every block. raises: ConfigError."""
        with self._changed:
            return self._ready(self._fitting(pattern))

    def wait(self, pattern: str, timeout: float | None) -> bool:
        """Wait for `ready`; False when the load ended without, or the time is over."""
        fitting = self._fitting(pattern)
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._ready(fitting), timeout)
            return self._ready(fitting)

    def end(self) -> None:
        """Nothing more arrives."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _ready(self, fitting: Sequence[int]) -> bool:
        return all(len(self._there[part]) == self._blocks for part in fitting)

    def _fitting(self, pattern: str) -> list[int]:
        fitting = [i for i, part in enumerate(self.parts) if fnmatchcase(part.name, pattern)]
        if not fitting:
            raise ConfigError(f"no part of this layout is named {pattern!r}")
        return fitting


Durability = Literal["behind", "flushed", "fsync"]


class PutTicket:
    """Follows one `put`.

    accepted: for each record, whether the cache took it.
    reasons:  for each record, None or why not: "queue_full", "unconfirmed", "read_only",
              "disk_full", "no_room", "class_pressure", "duplicate_in_call", "not_persistent",
              "wrong_secret". A
              record refused for the directory may still have been kept in host memory. An accepted
              one that was not stored says "source_changed", "disk_full" or "write_failed".
    """

    def __init__(self, reasons: Sequence[str | None]) -> None:
        self.reasons: tuple[str | None, ...] = tuple(reasons)
        self.accepted: tuple[bool, ...] = tuple([reason is None for reason in reasons])
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._waiting = 0
        self._closed = False
        self._stored = [False] * len(reasons)
        self._source: object = None
        self._future: Future[PutTicket] | None = None

    @property
    def done(self) -> bool:
        """No accepted record is still on its way to the promised durability."""
        return self._event.is_set()

    @property
    def future(self) -> Future[PutTicket]:
        """Has the ticket as its result once it is done. Few ask for it: it is made then."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                if self._event.is_set():
                    self._future.set_result(self)
            return self._future

    @property
    def stored(self) -> tuple[bool, ...]:
        """For each record, whether it has reached the promised durability."""
        with self._lock:
            return tuple(self._stored)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done; returns whether every accepted record was stored in time."""
        if not self._event.wait(timeout):
            return False
        return self.stored == self.accepted

    def keep_alive(self, source: object) -> None:
        """Hold the caller's buffers until the ticket is done."""
        with self._lock:
            if not self._event.is_set():
                self._source = source

    def expect(self, count: int = 1) -> None:
        """So many more records whose fate will be reported."""
        with self._lock:
            self._waiting += count

    def report(self, fates: Sequence[tuple[int, bool]]) -> None:
        """Which of the records that were expected are stored, and which never will be."""
        with self._lock:
            for index, stored in fates:
                self._stored[index] = stored
            self._waiting -= len(fates)
        self._settle()

    def note(self, index: int, reason: str) -> None:
        """Why an accepted record will not be stored."""
        with self._lock:
            self.reasons = (*self.reasons[:index], reason, *self.reasons[index + 1 :])

    def refuse(self, index: int, reason: str) -> None:
        """A record that could not be taken after all."""
        with self._lock:
            self.reasons = (*self.reasons[:index], reason, *self.reasons[index + 1 :])
            self.accepted = (*self.accepted[:index], False, *self.accepted[index + 1 :])

    def stored_now(self, indices: Iterable[int]) -> None:
        """Records that are there already."""
        with self._lock:
            for index in indices:
                self._stored[index] = True

    def all_expected(self) -> None:
        """No more `expect` follows."""
        self._closed = True
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            if self._waiting or not self._closed or self._event.is_set():
                return
            self._event.set()
            self._source = None
            future = self._future
        if future is not None:
            future.set_result(self)


class LoadJob:
    """Follows one `load`; the destination belongs to the job until it is done."""

    def __init__(self, blocks: int, destinations: object) -> None:
        # Views made from bare addresses keep nothing alive; the job does.
        self._destinations = destinations
        self.statuses: list[Status | None] = [None] * blocks
        self.arrivals: Arrivals | None = None
        self.future: Future[LoadResult] = Future()

    @property
    def done(self) -> bool:
        """The load has ended, well or not."""
        return self.future.done()

    def ready(self, what: int | str) -> bool:
        """Whether a block of the requested range is there, or, by name or pattern, a part of every
        block: bytes and checksum.

        Parts are known to loads that were given `parts`. raises: ConfigError for an unknown part.
        """
        if isinstance(what, int):
            return self.statuses[what] is Status.OK
        return self._known_parts().ready(what)

    def wait_ready(self, part: str, timeout: float | None = None) -> bool:
        """Wait until `ready(part)`; False when the load ends without it or the time is over."""
        return self._known_parts().wait(part, timeout)

    def _known_parts(self) -> Arrivals:
        if self.arrivals is None:
            raise ConfigError("this load has no parts to wait for: pass parts to load")
        return self.arrivals

    @property
    def result(self) -> LoadResult | None:
        """The result, or None while the load runs."""
        return self.future.result() if self.future.done() else None

    @overload
    def wait(self) -> LoadResult: ...

    @overload
    def wait(self, timeout: float) -> LoadResult | None: ...

    def wait(self, timeout: float | None = None) -> LoadResult | None:
        """Wait for the end; None when it has not come after `timeout` seconds."""
        try:
            return self.future.result(timeout)
        except TimeoutError:
            return None
