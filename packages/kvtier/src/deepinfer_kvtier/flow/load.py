"""Loads: host memory first, then down the tiers; concurrent loads of a record share one read."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import (
    Buffers,
    Records,
    Views,
    checksum_of,
    copy_views,
    records_in,
)
from deepinfer_kvtier.base.errors import BufferShapeError, ConfigError
from deepinfer_kvtier.base.timing import MIXED, Clock, Timings
from deepinfer_kvtier.base.values import (
    KIND_CODES,
    NO_ROW,
    LayoutSpec,
    LoadResult,
    Status,
    quality_of,
)
from deepinfer_kvtier.flow.compression import expand_into
from deepinfer_kvtier.flow.encryption import Sealer
from deepinfer_kvtier.flow.handles import Arrivals, LeaseBook, LoadJob, Match, plan_stages
from deepinfer_kvtier.flow.load_scheduler import LoadScheduler, LoadTicket
from deepinfer_kvtier.flow.part_loads import copy_stages, read_stages
from deepinfer_kvtier.flow.plan import CostModel
from deepinfer_kvtier.flow.tier import GuardedTier
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.reading import ALONE, Urgency, Wanted, taken, with_helpers

_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]
_COPY_RUN: Final = 64  # blocks copied between two looks at the clock


class _Flight(threading.Event):
    """Set when the reads that one load has claimed have ended."""

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority


class SingleFlight:
    """Who reads which record from a tier below host memory right now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: tuple[dict[bytes, _Flight], ...] = tuple({} for _ in KIND_CODES)

    def claim(self, kind: int, digests: Sequence[bytes], priority: int) -> dict[bytes, _Flight]:
        """Claim what nobody reads yet; returns the flights of those that another load reads."""
        others: dict[bytes, _Flight] = {}
        mine, flights = _Flight(priority), self._flights[kind]
        with self._lock:
            if flights.keys().isdisjoint(digests):
                flights.update(dict.fromkeys(digests, mine))
                return others
            for digest in digests:
                event = flights.setdefault(digest, mine)
                if event is not mine:
                    others[digest] = event
        return others

    def finish(self, kind: int, digests: Sequence[bytes]) -> None:
        """The claimed reads have ended, well or not."""
        with self._lock:
            events = set(map(self._flights[kind].pop, digests))
        for event in events:
            event.set()


@dataclass(frozen=True, slots=True)
class _Below:
    """What `Loader.fill` was asked, for the steps below host memory."""

    kind: int
    shard: int
    digests: Sequence[bytes]
    dst: Records
    rows: NDArray[Any] | None
    deadline: float | None
    in_time: Callable[[], bool]
    statuses: list[Status | None]
    sealer: Sealer | None
    urgency: Urgency


class Loader:
    """Fills caller buffers from the tiers of one cache."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        further: Sequence[GuardedTier],
        clock: Clock,
    ) -> None:
        self._host = host
        self._disk = disk
        self._further = further
        self._clock = clock
        self._single_flight = SingleFlight()
        self._counts_lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def fill(
        self,
        kind: int,
        shard: int,
        digests: Sequence[bytes],
        dst: Records,
        *,
        leased: Sequence[HostRecord | None],
        rows: NDArray[Any] | None,
        deadline: float | None,
        statuses: list[Status | None],
        arrivals: Arrivals | None = None,
        sealer: Sealer | None = None,
        urgency: Urgency = ALONE,
    ) -> list[Status]:
        """Bytes of records into `dst`; returns the status of each.

        leased:   records in memory whose lease the caller holds, None where there is none.
        rows:     places pinned by a lease, used before the index is asked.
        deadline: monotonic seconds after which nothing more is started.
        statuses: one item a record, set as soon as its fate is known.
        sealer:   opens what comes from below host memory; None = only records in the clear count.
        arrivals: brings the parts of blocks in stages and records what is there.
        urgency:  which loads pass this one between two pieces.
        """

        def in_time() -> bool:
            urgency.give_way()
            return deadline is None or self._clock.monotonic() < deadline

        others: Sequence[int] = range(len(leased))
        names, records = digests, list(leased)
        if any(leased):
            others = [i for i, record in enumerate(leased) if record is None]
            names = [digests[i] for i in others]
        pinned = self._host.pin_all(kind, names)
        for i, record in zip(others, pinned, strict=True):
            records[i] = record
        try:
            if arrivals is None:
                self._from_host(records, dst, in_time, statuses)
            else:
                for i in copy_stages(self._host, records, dst, arrivals):
                    statuses[i] = Status.OK
        finally:
            self._host.unpin(record for record in pinned if record is not None)
        absent = [i for i, status in enumerate(statuses) if status is None]
        if absent:
            job = _Below(
                kind, shard, digests, dst, rows, deadline, in_time, statuses, sealer, urgency
            )
            if arrivals is not None and sealer is None:
                absent = self._parts_from_disk(job, absent, arrivals)
            self._from_below(job, absent)
            if arrivals is not None:
                # What came whole has every part.
                there = [i for i in absent if statuses[i] is Status.OK]
                for stage in arrivals.stages:
                    arrivals.arrive(stage, there)
        final = [status or Status.MISS for status in statuses]
        good = final.count(Status.OK)
        with self._counts_lock:
            self.counts["records_ok"] += good
            if good < len(final):
                for status in set(Status) - {Status.OK}:
                    self.counts[f"records_{status.value}"] += final.count(status)
        return final

    def fill_from_host(
        self,
        records: Sequence[HostRecord],
        slots: NDArray[np.int64],
        rows: NDArray[np.uint8],
        statuses: list[Status | None],
        urgency: Urgency = ALONE,
    ) -> bool:
        """The short way for blocks that all lie in host memory under a lease the caller holds.

        returns: whether all are copied; if not, the status of those that are not is None.
        """
        for start in range(0, len(records), _COPY_RUN):
            chunk = slice(start, start + _COPY_RUN)
            run = records[chunk]
            urgency.give_way()
            self._host.copy_out(run, rows[chunk], slots[chunk])
            statuses[chunk] = [Status.OK] * len(run)
            for record in self._host.damaged(run):
                statuses[start + run.index(record)] = None
                self._host.remove(record.kind, record.digest, damaged=True)
        whole = None not in statuses
        if whole:
            with self._counts_lock:
                self.counts["records_ok"] += len(records)
        return whole

    # -- from host memory

    def _from_host(
        self,
        records: list[HostRecord | None],
        dst: Records,
        in_time: Callable[[], bool],
        statuses: list[Status | None],
    ) -> None:
        """Copy what is in memory, in runs; the rest keeps the status None."""
        at = 0 if any(records) else len(records)
        while at < len(records):
            end = at
            while end < len(records) and end - at < _COPY_RUN and _fits(records[end], dst):
                end += 1
            if end == at:
                at += 1
                continue
            if not in_time():
                statuses[at:] = [Status.TIMEOUT] * (len(records) - at)
                return
            run = cast("list[HostRecord]", records[at:end])
            if dst.rows is not None:
                self._host.copy_out(run, dst.rows[at:end])
            else:
                for i, record in enumerate(run, start=at):
                    _copy_to(record, dst.views(i))
            bad = self._host.damaged(run)
            statuses[at:end] = [Status.OK] * len(run)
            for record in bad:
                statuses[at + run.index(record)] = None
                self._host.remove(record.kind, record.digest, damaged=True)
            at = end

    # -- from below

    def _parts_from_disk(self, job: _Below, absent: list[int], arrivals: Arrivals) -> list[int]:
        """Read in stages what can be; returns what has to come whole."""
        if self._disk is None:
            return absent
        size = job.dst.payload
        members = [Wanted(job.digests[i], job.dst.views(i), size) for i in absent]
        statuses = read_stages(
            self._disk, job.kind, job.shard, members, absent, job.dst, arrivals, job.in_time
        )
        good = [j for j, i in enumerate(absent) if statuses.get(i) is Status.OK]
        self._promote(job, [absent[j] for j in good], [members[j] for j in good])
        for i, status in statuses.items():
            if status is not Status.CORRUPT:  # a further tier may have a good one
                job.statuses[i] = status
        return [i for i in absent if job.statuses[i] is None]

    def _from_below(self, job: _Below, absent: list[int]) -> None:
        digests = job.digests
        others = self._single_flight.claim(
            job.kind, [digests[i] for i in absent], job.urgency.priority
        )
        mine = absent if not others else [i for i in absent if digests[i] not in others]
        try:
            self._read(job, mine)
        finally:
            self._single_flight.finish(job.kind, [digests[i] for i in mine])
        if not others:
            return
        # Not for a less urgent reader: it may be waiting for us to pass.
        theirs = [i for i in absent if digests[i] in others]
        waited = {others[digests[i]] for i in theirs}
        for event in {event for event in waited if event.priority >= job.urgency.priority}:
            left = None
            if job.deadline is not None:
                left = max(0.0, job.deadline - self._clock.monotonic())
            event.wait(left)
        self._share(job, theirs)
        # The other reader is less urgent or failed, or host memory had no room for what it read.
        self._read(job, [i for i in theirs if job.statuses[i] is None])

    def _share(self, job: _Below, which: list[int]) -> None:
        """Copy what other loads have read from host memory, where they have left it."""
        found = self._host.pin_all(job.kind, [job.digests[i] for i in which])
        records: list[HostRecord | None] = [None] * len(job.digests)
        for i, record in zip(which, found, strict=True):
            records[i] = record
        try:
            self._from_host(records, job.dst, lambda: True, job.statuses)
        finally:
            self._host.unpin(record for record in found if record is not None)
        shared = [job.statuses[i] for i in which].count(Status.OK)
        with self._counts_lock:
            self.counts["shared_reads"] += shared

    def _read(self, job: _Below, which: list[int]) -> None:
        if not which:
            return
        size = job.dst.payload
        digests = [job.digests[i] for i in which]
        views = job.dst.views_of(which)
        members = [Wanted(*pair, size) for pair in zip(digests, views, strict=True)]
        statuses = [Status.MISS] * len(members)
        if self._disk is not None:
            leased = None if job.rows is None else job.rows[np.array(which)]
            statuses = self._read_disk(self._disk, job, members, leased)
        for tier in self._further:
            left = [j for j, status in enumerate(statuses) if status is not Status.OK]
            if not left:
                break
            some = [members[j] for j in left]
            lower = tier.get_into(job.kind, job.shard, some, in_time=job.in_time)
            self._open(job, some, lower, in_clear=not tier.tier.caps.persistent)
            for j, status in zip(left, lower, strict=True):
                if status is not Status.MISS:
                    statuses[j] = status
        for i, status in zip(which, statuses, strict=True):
            job.statuses[i] = status
        if size <= self._host.capacity_bytes:
            good = [j for j, status in enumerate(statuses) if status is Status.OK]
            self._promote(job, [which[j] for j in good], [members[j] for j in good])

    def _read_disk(
        self,
        disk: DiskTier,
        job: _Below,
        members: Sequence[Wanted],
        leased: NDArray[Any] | None,
    ) -> list[Status]:
        kind, shard, in_time = job.kind, job.shard, job.in_time
        if leased is not None and (leased["length"] == NO_ROW).any():
            leased = None
        urgency = job.urgency
        statuses = disk.get_into(
            kind, shard, members, rows=leased, in_time=in_time, urgency=urgency
        )
        if leased is not None and Status.MISS in statuses:
            missed = [j for j, status in enumerate(statuses) if status is Status.MISS]
            # The leased place is gone; another writer may have stored the same record.
            second = disk.get_into(
                kind, shard, [members[j] for j in missed], in_time=in_time, urgency=urgency
            )
            for j, status in zip(missed, second, strict=True):
                statuses[j] = status
        self._open(job, members, statuses, disk=disk)
        return statuses

    def _open(
        self,
        job: _Below,
        members: Sequence[Wanted],
        statuses: list[Status],
        *,
        disk: DiskTier | None = None,
        in_clear: bool = False,
    ) -> None:
        """Decrypt and expand what was read; what cannot be is a miss, and nobody else's loss.

        disk:      where it was read, if it was there.
        in_clear:  whether unsealed records count where there is a key, as from other memories.
        """
        packed: deque[int] = deque()
        if job.sealer is None and all(not w.seal and w.packed is None for w in members):
            return
        for j, want in enumerate(members):
            if statuses[j] is not Status.OK:
                continue
            if want.seal or (job.sealer is not None and not in_clear):
                statuses[j] = self._decrypt(job, want)
            if want.packed is not None and statuses[j] is Status.OK:
                packed.append(j)
        if packed:
            self._expand(job, members, statuses, packed, disk)

    def _decrypt(self, job: _Below, want: Wanted) -> Status:
        views = want.views if want.packed is None else [want.packed]
        if (
            job.sealer is None
            or not want.seal
            or not job.sealer.open(views, want.seal, want.digest, job.kind, want.depth)
        ):
            with self._counts_lock:
                self.counts["not_opened"] += 1
            return Status.MISS
        want.seal = b""
        if want.packed is None:
            want.checksum = checksum_of(want.views)
        return Status.OK

    def _expand(
        self,
        job: _Below,
        members: Sequence[Wanted],
        statuses: list[Status],
        left: deque[int],
        disk: DiskTier | None,
    ) -> None:
        """Expand records into their destinations, with the help of the threads that verify."""
        pool = None if self._disk is None else self._disk.verifiers
        helpers = 0 if self._disk is None else self._disk.config.verify_threads
        which = list(left)

        def work(helping: bool) -> Counter[str]:
            mine: Counter[str] = Counter()
            for j in taken(left, job.urgency, helping=helping):
                want = members[j]
                stored, want.packed = want.packed, None
                assert stored is not None
                statuses[j] = expand_into(want, stored, mine)
            return mine

        for noticed in with_helpers(work, pool, min(helpers, len(left) - 1)):
            with self._counts_lock:
                (self.counts if disk is None else disk.counts).update(noticed)
        for j in which:
            if disk is not None and statuses[j] is not Status.OK:
                damaged = statuses[j] is Status.CORRUPT
                disk.give_up(job.kind, job.shard, members[j].digest, damaged=damaged)
            if statuses[j] is Status.SKIPPED:
                statuses[j] = Status.MISS

    def _promote(self, job: _Below, which: Sequence[int], members: Sequence[Wanted]) -> None:
        """Keep what was read in host memory, as far as there is room."""
        size = job.dst.payload
        if size > self._host.capacity_bytes:
            return
        new = [
            j
            for j, want in enumerate(members)
            if not self._host.contains(job.kind, want.digest)  # a further tier may have kept it
        ]
        if not new:
            return
        if len(new) < len(members):
            which, members = [which[j] for j in new], [members[j] for j in new]
        arrays = self._host.take_many(job.kind, size, len(which))
        which, members = which[: len(arrays)], members[: len(arrays)]
        rows = job.dst.rows
        if rows is not None and which and which[-1] - which[0] == len(which) - 1:
            self._host.fill(arrays, rows[which[0] : which[-1] + 1])
        else:
            for array, want in zip(arrays, members, strict=True):
                copy_views(want.views, array)
        made = [
            HostRecord(
                job.kind,
                want.digest,
                want.parent,
                want.depth,
                array,
                quality_of(want.approximate, want.generation),
                want.checksum,
            )
            for array, want in zip(arrays, members, strict=True)
        ]
        self._host.unpin(self._host.publish_all(made))


def _fits(record: HostRecord | None, dst: Records) -> bool:
    return record is not None and record.data.nbytes == dst.payload


def _copy_to(record: HostRecord, views: Views) -> None:
    source, at = record.data.data, 0
    for view in views:
        end = at + view.nbytes
        if end > at:  # an empty view may be a read-only stand-in
            view[:] = source[at:end]
        at = end


class Tiers(Protocol):
    """What a load needs of the tiers of one cache."""

    clock: Clock
    loader: Loader
    leases: LeaseBook
    threads: LoadScheduler
    costs: CostModel
    timings: Timings

    def sync_tiers(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One `load` as it was asked for.

    blocks: None = all of the hit. deadline: monotonic seconds.
    """

    layout: LayoutSpec
    shard: int
    sealer: Sealer | None
    match: Match
    blocks: slice | None
    dst: Buffers
    state_dst: Any
    parts: Sequence[str] | None
    deadline: float | None


def start_load(tiers: Tiers, request: LoadRequest, *, priority: int, wait: bool) -> LoadJob:
    """Everything behind `Namespace.load`. raises: BufferShapeError, ConfigError."""
    run = _LoadRun(tiers, request)
    if wait:
        tiers.threads.begin(priority)
        try:
            run(LoadTicket(priority))
        finally:
            tiers.threads.end(priority)
    else:
        tiers.threads.submit(run, priority)
    return run.job


class _LoadRun:
    """One load: destinations are checked when it is made, blocks and state filled when called."""

    def __init__(self, tiers: Tiers, request: LoadRequest) -> None:
        self._tiers = tiers
        self._request = request
        layout, match = request.layout, request.match
        self._chosen = _chosen(match, request.blocks, request.dst)
        if request.state_dst is not None and match.state is None:
            raise ConfigError("this match has no state slot: check match.state before loading it")
        self._room = self._state_room = None
        if request.dst is not None:
            sizes = layout.part_sizes("block")
            self._room = records_in(request.dst, len(self._chosen), sizes, writable=True)
        if request.state_dst is not None:
            sizes = layout.part_sizes("state")
            self._state_room = records_in([request.state_dst], 1, sizes, writable=True)
        self.job = LoadJob(len(self._chosen), (request.dst, request.state_dst))
        if request.parts is not None:
            named = layout.kinds["block"]
            deliver = None if self._room is None else self._room.deliver
            stages = plan_stages(named, request.parts)
            self.job.arrivals = Arrivals(named, len(self._chosen), stages, deliver)

    def __call__(self, urgency: LoadTicket) -> None:
        job = self.job
        try:
            result = self._fill(urgency)
        except BaseException as error:
            job.future.set_exception(error)
            raise
        finally:
            if job.arrivals is not None:
                job.arrivals.end()
        job.future.set_result(result)

    def _fill(self, urgency: LoadTicket) -> LoadResult:
        tiers, match, room = self._tiers, self._request.match, self._room
        started = time.perf_counter()
        held = tiers.leases.hold(match.lease)
        try:
            statuses = self._fill_blocks(held, urgency)
            if room is not None:
                self._learn(match.only_tier(self._chosen), room, statuses, started)
            state = self._fill_state(held, urgency)
        finally:
            if held:
                tiers.leases.unhold(match.lease)
        nbytes, tier = 0, match.state.tier if match.state is not None else MIXED
        if room is not None:
            nbytes, tier = len(room) * room.payload, match.only_tier(self._chosen) or MIXED
        tiers.timings.observe("load", tier, nbytes, time.perf_counter() - started)
        tiers.sync_tiers()
        return _result(tuple(statuses), state)

    def _fill_state(self, held: bool, urgency: LoadTicket) -> Status | None:
        request, match, room = self._request, self._request.match, self._state_room
        if room is None or match.state is None:
            return None
        started = time.perf_counter()
        (status,) = self._tiers.loader.fill(
            _STATE,
            request.shard,
            [match.digests[match.state.n_blocks - 1]],
            room,
            leased=[match.state_record() if held else None],
            rows=match.state_row(),
            deadline=request.deadline,
            statuses=[None],
            sealer=request.sealer,
            urgency=urgency,
        )
        self._learn(match.state.tier, room, [status], started)
        return status

    def _fill_blocks(self, held: bool, urgency: LoadTicket) -> Sequence[Status]:
        room, job = self._room, self.job
        if room is None:
            return ()
        if room.deliver is None:
            return self._bring(room, held, urgency, job.statuses)
        # Nothing is ready before it has left the staging memory.
        staged: list[Status | None] = [None] * len(room)
        found = self._bring(room, held, urgency, staged)
        room.deliver(None)
        job.statuses[:] = found
        return found

    def _bring(
        self, room: Records, held: bool, urgency: LoadTicket, statuses: list[Status | None]
    ) -> Sequence[Status]:
        request, match, arrivals = self._request, self._request.match, self.job.arrivals
        within = slice(self._chosen.start, self._chosen.stop)
        leased = match.records()[within] if held else (None,) * len(self._chosen)
        rows = match.rows()
        short = held and request.deadline is None and arrivals is None
        slots = match.slots() if short else None
        loader = self._tiers.loader
        if slots is not None and room.rows is not None and room.payload and len(room):
            records = cast("tuple[HostRecord, ...]", leased)
            if loader.fill_from_host(records, slots[within], room.rows, statuses, urgency):
                return (Status.OK,) * len(room)
            done = zip(leased, statuses, strict=True)
            leased = tuple(None if status is None else record for record, status in done)
        return loader.fill(
            _BLOCK,
            request.shard,
            tuple(match.digests)[within],  # plain: those that know their place are slower
            room,
            leased=leased,
            rows=None if rows is None else rows[within],
            deadline=request.deadline,
            statuses=statuses,
            arrivals=arrivals,
            sealer=request.sealer,
            urgency=urgency,
        )

    def _learn(
        self, tier: str | None, room: Records, statuses: Sequence[Status], started: float
    ) -> None:
        """What a load from one tier took teaches the planner; a mixed or failed one nothing."""
        if tier is not None and statuses.count(Status.OK) == len(room):
            nbytes = len(room) * room.payload
            self._tiers.costs.observe_load(tier, nbytes, time.perf_counter() - started)


def _chosen(match: Match, blocks: slice | None, dst: Buffers) -> range:
    if dst is None:
        if blocks is not None:
            raise BufferShapeError("blocks were asked for without a destination: pass dst")
        return range(0)
    whole = slice(0, match.n_blocks) if blocks is None else blocks
    chosen = range(*whole.indices(match.block_prefix))
    if chosen.step != 1:
        raise ConfigError(f"blocks must be a slice with step 1, got {whole}")
    return chosen


def _result(blocks: tuple[Status, ...], state: Status | None) -> LoadResult:
    good = blocks.count(Status.OK)
    if good == len(blocks) and state in (None, Status.OK):
        return LoadResult(good, blocks, state, None)
    ok = next((i for i, s in enumerate(blocks) if s is not Status.OK), len(blocks))
    bad = next(s for s in (*blocks, state or Status.OK) if s is not Status.OK)
    return LoadResult(ok, blocks, state, f"the first record not loaded is {bad.value}")
