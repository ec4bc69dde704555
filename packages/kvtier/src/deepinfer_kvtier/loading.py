"""What happens to one `load`: destinations are checked, then blocks and state are filled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from deepinfer_kvtier.buffers import Buffers, Views, record_views
from deepinfer_kvtier.errors import BufferShapeError, ConfigError
from deepinfer_kvtier.layout import KIND_CODES, LayoutSpec
from deepinfer_kvtier.match import Match
from deepinfer_kvtier.reading import Wanted
from deepinfer_kvtier.records import LoadResult, Status
from deepinfer_kvtier.tickets import LoadJob
from deepinfer_kvtier.tierset import TierSet

_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]


def start_load(
    tiers: TierSet,
    layout: LayoutSpec,
    shard: int,
    match: Match,
    *,
    blocks: slice | None,
    dst: Buffers,
    state_dst: Any,
    deadline_ms: float | None,
    wait: bool,
) -> LoadJob:
    """Everything behind `Namespace.load`. raises: BufferShapeError, ConfigError."""
    chosen = _chosen(match, blocks, dst)
    if state_dst is not None and match.state is None:
        raise ConfigError("this match has no state slot: check match.state before loading it")
    block_views: list[Views] = []
    if dst is not None:
        sizes = layout.part_sizes("block")
        block_views = record_views(dst, len(chosen), sizes, writable=True)
    state_views: Views | None = None
    if state_dst is not None:
        sizes = layout.part_sizes("state")
        state_views = record_views([state_dst], 1, sizes, writable=True)[0]
    deadline = None
    if deadline_ms is not None:
        deadline = tiers.clock.monotonic() + deadline_ms / 1000
    job = LoadJob(len(chosen), (dst, state_dst))

    def work() -> None:
        try:
            result = _fill(tiers, shard, match, chosen, block_views, state_views, deadline, job)
        except BaseException as error:
            job.future.set_exception(error)
            raise
        job.future.set_result(result)

    if wait:
        work()
    else:
        tiers.threads.submit(work)
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
    match: Match,
    chosen: range,
    block_views: list[Views],
    state_views: Views | None,
    deadline: float | None,
    job: LoadJob,
) -> LoadResult:
    started = time.perf_counter()
    rows = match.rows()
    wanted = [
        Wanted(match.digests[block], views)
        for block, views in zip(chosen, block_views, strict=True)
    ]

    def report(index: int, status: Status) -> None:
        job.statuses[index] = status

    blocks_started = time.perf_counter()
    statuses = tiers.loader.fill(
        _BLOCK,
        shard,
        wanted,
        leased=match.records()[chosen.start : chosen.stop],
        rows=None if rows is None else rows[chosen.start : chosen.stop],
        deadline=deadline,
        report=report,
    )
    _learn(tiers, match.only_tier(chosen), wanted, statuses, blocks_started)
    state: Status | None = None
    if state_views is not None and match.state is not None:
        want = Wanted(match.digests[match.state.n_blocks - 1], state_views)
        state_started = time.perf_counter()
        (state,) = tiers.loader.fill(
            _STATE,
            shard,
            [want],
            leased=[match.state_record()],
            rows=match.state_row(),
            deadline=deadline,
            report=lambda _index, _status: None,
        )
        _learn(tiers, match.state.tier, [want], [state], state_started)
    ok = next((i for i, s in enumerate(statuses) if s is not Status.OK), len(statuses))
    bad = next((s for s in (*statuses, state or Status.OK) if s is not Status.OK), None)
    tiers.loader.observe(sum(want.nbytes for want in wanted), time.perf_counter() - started)
    tiers.sync_tiers()
    error = None if bad is None else f"the first record not loaded is {bad.value}"
    return LoadResult(ok, tuple(statuses), state, error)


def _learn(
    tiers: TierSet,
    tier: str | None,
    wanted: Sequence[Wanted],
    statuses: Sequence[Status],
    started: float,
) -> None:
    """What a load from one tier took teaches the planner; a mixed or failed one tells nothing."""
    if tier is not None and all(status is Status.OK for status in statuses):
        nbytes = sum(want.nbytes for want in wanted)
        tiers.costs.observe_load(tier, nbytes, time.perf_counter() - started)
