"""What happens to one `load`: destinations are checked, then blocks and state are filled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from deepinfer_kvtier.buffers import Buffers, Records, records_in
from deepinfer_kvtier.coding.sealing import Sealer
from deepinfer_kvtier.errors import BufferShapeError, ConfigError
from deepinfer_kvtier.layout import KIND_CODES, LayoutSpec
from deepinfer_kvtier.loads.stages import Arrivals, plan_stages
from deepinfer_kvtier.loads.turns import Turn
from deepinfer_kvtier.match import Match
from deepinfer_kvtier.memory.host import HostRecord
from deepinfer_kvtier.records import LoadResult, Status
from deepinfer_kvtier.tickets import LoadJob
from deepinfer_kvtier.tierset import TierSet
from deepinfer_kvtier.timings import MIXED

_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]


def start_load(
    tiers: TierSet,
    layout: LayoutSpec,
    shard: int,
    sealer: Sealer | None,
    match: Match,
    *,
    blocks: slice | None,
    dst: Buffers,
    state_dst: Any,
    parts: Sequence[str] | None,
    deadline_ms: float | None,
    priority: int,
    wait: bool,
) -> LoadJob:
    """Everything behind `Namespace.load`. raises: BufferShapeError, ConfigError."""
    chosen = _chosen(match, blocks, dst)
    if state_dst is not None and match.state is None:
        raise ConfigError("this match has no state slot: check match.state before loading it")
    room = state_room = None
    if dst is not None:
        room = records_in(dst, len(chosen), layout.part_sizes("block"), writable=True)
    if state_dst is not None:
        state_room = records_in([state_dst], 1, layout.part_sizes("state"), writable=True)
    deadline = None
    if deadline_ms is not None:
        deadline = tiers.clock.monotonic() + deadline_ms / 1000
    job = LoadJob(len(chosen), (dst, state_dst))
    if parts is not None:
        named = layout.kinds["block"]
        job.arrivals = Arrivals(
            named, len(chosen), plan_stages(named, parts), None if room is None else room.deliver
        )

    def work(turn: Turn) -> None:
        try:
            result = _fill(
                tiers, shard, sealer, match, chosen, room, state_room, deadline, job, turn
            )
        except BaseException as error:
            job.future.set_exception(error)
            raise
        finally:
            if job.arrivals is not None:
                job.arrivals.end()
        job.future.set_result(result)

    if wait:
        tiers.threads.begin(priority)
        try:
            work(Turn(priority))
        finally:
            tiers.threads.end(priority)
    else:
        tiers.threads.submit(work, priority)
    return job


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


def _fill(
    tiers: TierSet,
    shard: int,
    sealer: Sealer | None,
    match: Match,
    chosen: range,
    room: Records | None,
    state_room: Records | None,
    deadline: float | None,
    job: LoadJob,
    turn: Turn,
) -> LoadResult:
    started = time.perf_counter()
    held = tiers.leases.hold(match.lease)
    try:
        statuses = _fill_blocks(
            tiers, shard, sealer, match, chosen, room, deadline, job, held, turn
        )
        if room is not None:
            _learn(tiers, match.only_tier(chosen), room, statuses, started)
        state: Status | None = None
        if state_room is not None and match.state is not None:
            state_started = time.perf_counter()
            (state,) = tiers.loader.fill(
                _STATE,
                shard,
                [match.digests[match.state.n_blocks - 1]],
                state_room,
                leased=[match.state_record() if held else None],
                rows=match.state_row(),
                deadline=deadline,
                statuses=[None],
                sealer=sealer,
                turn=turn,
            )
            _learn(tiers, match.state.tier, state_room, [state], state_started)
    finally:
        if held:
            tiers.leases.unhold(match.lease)
    nbytes, tier = 0, match.state.tier if match.state is not None else MIXED
    if room is not None:
        nbytes, tier = len(room) * room.payload, match.only_tier(chosen) or MIXED
    tiers.timings.observe("load", tier, nbytes, time.perf_counter() - started)
    tiers.sync_tiers()
    return _result(tuple(statuses), state)


def _fill_blocks(
    tiers: TierSet,
    shard: int,
    sealer: Sealer | None,
    match: Match,
    chosen: range,
    room: Records | None,
    deadline: float | None,
    job: LoadJob,
    held: bool,
    turn: Turn,
) -> Sequence[Status]:
    if room is None:
        return ()
    if room.deliver is None:
        return _bring(
            tiers, shard, sealer, match, chosen, room, deadline, job, held, turn, job.statuses
        )
    # Nothing is ready before it has left the staging memory.
    staged: list[Status | None] = [None] * len(room)
    found = _bring(tiers, shard, sealer, match, chosen, room, deadline, job, held, turn, staged)
    room.deliver(None)
    job.statuses[:] = found
    return found


def _bring(
    tiers: TierSet,
    shard: int,
    sealer: Sealer | None,
    match: Match,
    chosen: range,
    room: Records,
    deadline: float | None,
    job: LoadJob,
    held: bool,
    turn: Turn,
    statuses: list[Status | None],
) -> Sequence[Status]:
    within = slice(chosen.start, chosen.stop)
    leased = match.records()[within] if held else (None,) * len(chosen)
    rows = match.rows()
    slots = match.slots() if held and deadline is None and job.arrivals is None else None
    if slots is not None and room.rows is not None and room.payload and len(room):
        records = cast("tuple[HostRecord, ...]", leased)
        if tiers.loader.fill_from_host(records, slots[within], room.rows, statuses, turn):
            return (Status.OK,) * len(room)
        done = zip(leased, statuses, strict=True)
        leased = tuple(None if status is None else record for record, status in done)
    return tiers.loader.fill(
        _BLOCK,
        shard,
        match.digests[within],
        room,
        leased=leased,
        rows=None if rows is None else rows[within],
        deadline=deadline,
        statuses=statuses,
        arrivals=job.arrivals,
        sealer=sealer,
        turn=turn,
    )


def _learn(
    tiers: TierSet,
    tier: str | None,
    room: Records,
    statuses: Sequence[Status],
    started: float,
) -> None:
    """What a load from one tier took teaches the planner; a mixed or failed one tells nothing."""
    if tier is not None and statuses.count(Status.OK) == len(room):
        nbytes = len(room) * room.payload
        tiers.costs.observe_load(tier, nbytes, time.perf_counter() - started)


def _result(blocks: tuple[Status, ...], state: Status | None) -> LoadResult:
    good = blocks.count(Status.OK)
    if good == len(blocks) and state in (None, Status.OK):
        return LoadResult(good, blocks, state, None)
    ok = next((i for i, s in enumerate(blocks) if s is not Status.OK), len(blocks))
    bad = next(s for s in (*blocks, state or Status.OK) if s is not Status.OK)
    return LoadResult(ok, blocks, state, f"the first record not loaded is {bad.value}")
