"""The longest prefix that all needed records of are somewhere, pinned before it is returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.directory import DirectoryTier
from deepinfer_kvtier.host import HostRecord
from deepinfer_kvtier.layout import KIND_CODES
from deepinfer_kvtier.match import Match, spans_of
from deepinfer_kvtier.records import StateHit
from deepinfer_kvtier.table import APPROXIMATE_BIT

if TYPE_CHECKING:
    from deepinfer_kvtier.cache import Cache
    from deepinfer_kvtier.namespace import Namespace

_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]
_MAX_SURVEYS = 4


@dataclass(slots=True)
class _Survey:
    """Pinned records of one look at the tiers; `records[i]` is None for a block not in memory."""

    records: list[HostRecord | None]
    rows: NDArray[Any] | None
    prefix: int
    state_blocks: int
    state_record: HostRecord | None
    state_row: NDArray[Any] | None


def find_prefix(
    ns: Namespace,
    digests: tuple[bytes, ...],
    *,
    limit: int,
    prompt_tokens: int,
    exact: bool,
    lease_s: float,
    accept_approximate: bool,
) -> Match:
    """Everything behind `Namespace.match` after hashing."""
    cache = ns.cache
    needs_state = ns.layout.payload_bytes("state") > 0
    probe = digests[:limit]
    survey = _look(ns, probe, needs_state, accept_approximate)
    short = survey.prefix < limit or (exact and survey.state_blocks < survey.prefix)
    if short and limit and cache.directory is not None and _refresh(cache, cache.directory):
        _unpin(cache, survey)
        survey = _look(ns, probe, needs_state, accept_approximate)
    segments: list[int] = []
    for _ in range(_MAX_SURVEYS):
        taken = _pin_segments(cache, survey)
        if taken is not None:
            segments = taken
            break
        _unpin(cache, survey)
        survey = _look(ns, probe, needs_state, accept_approximate)
    else:
        # The directory changes faster than we can look: what is in memory will do.
        _unpin(cache, survey)
        survey = _look(ns, probe, needs_state, accept_approximate, host_only=True)
    match = _build(ns, digests, survey, segments, prompt_tokens, exact, lease_s)
    _account(ns, match, limit)
    cache.sync_tiers()
    return match


def _refresh(cache: Cache, directory: DirectoryTier) -> bool:
    if directory.breaker.is_open:
        return False
    try:
        directory.refresh()
    except OSError:
        directory.breaker.error()
        cache.counts["refresh_errors"] += 1
        return False
    return True


def _look(
    ns: Namespace,
    probe: tuple[bytes, ...],
    needs_state: bool,
    accept_approximate: bool,
    *,
    host_only: bool = False,
) -> _Survey:
    cache = ns.cache
    records = cache.host.pin_all(_BLOCK, probe)
    directory = None if host_only else cache.directory
    if directory is not None and directory.breaker.is_open:
        directory = None
    rows: NDArray[Any] | None = None
    present: NDArray[np.bool_] = np.array([record is not None for record in records], dtype=bool)
    if directory is not None and probe and not present.all():
        rows = directory.probe(_BLOCK, ns.shard, probe)
        expected = ns.layout.payload_bytes("block")
        on_disk = rows["length"] == expected
        if not accept_approximate:
            on_disk &= (rows["flags"] & APPROXIMATE_BIT) == 0
        present |= on_disk
    if not accept_approximate:
        fuzzy = [record is not None and record.approximate for record in records]
        present &= ~np.array(fuzzy, dtype=bool)
    prefix = len(probe) if present.all() else int(np.argmin(present))
    cache.host.unpin(record for record in records[prefix:] if record is not None)
    survey = _Survey(
        records[:prefix], None if rows is None else rows[:prefix], prefix, 0, None, None
    )
    if needs_state and prefix:
        _look_for_state(ns, probe[:prefix], survey, directory, accept_approximate)
    return survey


def _look_for_state(
    ns: Namespace,
    probe: tuple[bytes, ...],
    survey: _Survey,
    directory: DirectoryTier | None,
    accept_approximate: bool,
) -> None:
    """The deepest boundary with a state slot; memory is preferred at equal depth."""
    host = ns.cache.host
    for depth in range(len(probe), 0, -1):
        record = host.pin(_STATE, probe[depth - 1])
        if record is None:
            continue
        if record.approximate and not accept_approximate:
            host.unpin([record])
            continue
        survey.state_blocks, survey.state_record = depth, record
        break
    if directory is None or survey.state_blocks == len(probe):
        return
    deeper = probe[survey.state_blocks :]
    rows = directory.probe(_STATE, ns.shard, deeper)
    there = rows["length"] == ns.layout.payload_bytes("state")
    if not accept_approximate:
        there &= (rows["flags"] & APPROXIMATE_BIT) == 0
    found = np.flatnonzero(there)
    if len(found):
        if survey.state_record is not None:
            host.unpin([survey.state_record])
            survey.state_record = None
        last = int(found[-1])
        survey.state_blocks += last + 1
        survey.state_row = rows[last : last + 1]


def _unpin(cache: Cache, survey: _Survey) -> None:
    held = [record for record in (*survey.records, survey.state_record) if record is not None]
    cache.host.unpin(held)


def _pin_segments(cache: Cache, survey: _Survey) -> list[int] | None:
    """Hold the files behind the survey; None when one is gone, after forgetting its rows."""
    directory = cache.directory
    if directory is None:
        return []
    needed: set[int] = set()
    if survey.rows is not None:
        absent = np.array([record is None for record in survey.records], dtype=bool)
        needed.update(int(n) for n in np.unique(survey.rows["segment"][absent]))
    if survey.state_row is not None:
        needed.add(int(survey.state_row["segment"][0]))
    taken: list[int] = []
    for local in sorted(needed):
        try:
            fd = directory.segments.acquire(local)
        except OSError:
            directory.breaker.error()
            fd = None
        if fd is None:
            directory.forget_segment(directory.segments.get(local))
            for held in taken:
                directory.segments.release(held)
            return None
        taken.append(local)
    return taken


def _build(
    ns: Namespace,
    digests: tuple[bytes, ...],
    survey: _Survey,
    segments: list[int],
    prompt_tokens: int,
    exact: bool,
    lease_s: float,
) -> Match:
    size = ns.layout.block_tokens
    tiers = tuple("disk" if record is None else "host" for record in survey.records)
    fuzzy, generations = _marks(survey, tiers)
    state = _state_hit(ns, survey)
    n_blocks = survey.state_blocks if exact else survey.prefix
    hit_fuzzy = any(fuzzy[:n_blocks])
    generation = max(generations[:n_blocks], default=0)
    if exact and state is not None:
        hit_fuzzy |= state.approximate
        generation = max(generation, state.replay_generation)
    held = [record for record in (*survey.records, survey.state_record) if record is not None]
    lease = ns.cache.leases.grant(held, segments, lease_s)
    return Match(
        n_blocks=n_blocks,
        n_tokens=n_blocks * size,
        block_prefix=survey.prefix,
        state=state,
        spans=spans_of(tiers[:n_blocks], ns.layout.payload_bytes("block")),
        digests=digests,
        approximate=hit_fuzzy,
        replay_generation=generation,
        block_approximate=any(fuzzy),
        block_generation=max(generations, default=0),
        prompt_tokens=prompt_tokens,
        lease=lease,
        lease_s=lease_s,
        _book=ns.cache.leases,
        _records=tuple(survey.records),
        _state_record=survey.state_record,
        _rows=survey.rows,
        _state_row=survey.state_row,
    )


def _marks(survey: _Survey, tiers: tuple[str, ...]) -> tuple[list[bool], list[int]]:
    """Approximate flag and replay generation of each block of the prefix."""
    fuzzy: list[bool] = []
    generations: list[int] = []
    flags = None if survey.rows is None else survey.rows["flags"].tolist()
    for i, record in enumerate(survey.records):
        if record is not None:
            fuzzy.append(record.approximate)
            generations.append(record.generation)
        else:
            assert flags is not None  # a block that is not in memory was found by its row
            fuzzy.append(bool(flags[i] & APPROXIMATE_BIT))
            generations.append(flags[i] & ~APPROXIMATE_BIT)
    return fuzzy, generations


def _state_hit(ns: Namespace, survey: _Survey) -> StateHit | None:
    if survey.state_blocks == 0:
        return None
    record, row = survey.state_record, survey.state_row
    if record is not None:
        fuzzy, generation = record.approximate, record.generation
    else:
        assert row is not None
        flags = int(row["flags"][0])
        fuzzy, generation = bool(flags & APPROXIMATE_BIT), flags & ~APPROXIMATE_BIT
    return StateHit(
        n_blocks=survey.state_blocks,
        n_tokens=survey.state_blocks * ns.layout.block_tokens,
        tier="disk" if record is None else "host",
        bytes=ns.layout.payload_bytes("state"),
        approximate=fuzzy,
        replay_generation=generation,
    )


def _account(ns: Namespace, match: Match, limit: int) -> None:
    """Recency and counters; the head of a chain ends up younger than its tail."""
    cache = ns.cache
    hit = match.digests[: match.n_blocks]
    cache.host.touch(_BLOCK, hit)
    if match.state is not None:
        state_digest = (match.digests[match.state.n_blocks - 1],)
        cache.host.touch(_STATE, state_digest)
    else:
        state_digest = ()
    if cache.directory is not None:
        cache.directory.touch(_BLOCK, ns.shard, hit)
        cache.directory.touch(_STATE, ns.shard, state_digest)
    tokens = ns.layout.block_tokens
    for counts in (cache.counts, ns.counts):
        counts["matches"] += 1
        counts["prompt_tokens"] += match.prompt_tokens
        counts["hit_tokens"] += match.n_tokens
        for span in match.spans:
            counts[f"hit_tokens_{span.tier}"] += span.count * tokens
        if ns.layout.payload_bytes("state") and limit:
            counts["state_hits" if match.state is not None else "state_misses"] += 1
