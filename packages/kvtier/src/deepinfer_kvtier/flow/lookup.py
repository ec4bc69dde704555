"""The longest prefix that all needed records of are somewhere, pinned before it is returned.

Tiers are asked from the fastest down: host memory, the local directory, then the further tiers in
order; each is asked only for what is missing above it. What lies in host memory or in a file of the
directory is pinned; records of further tiers cannot be, they may be gone when they are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.values import (
    APPROXIMATE_BIT,
    GENERATION_BITS,
    KIND_CODES,
    LayoutSpec,
    StateHit,
)
from deepinfer_kvtier.flow.handles import Match, spans_of
from deepinfer_kvtier.flow.tier import GuardedTier
from deepinfer_kvtier.flow.tiers import TierSet
from deepinfer_kvtier.host.eviction import Use
from deepinfer_kvtier.host.memory import HostRecord
from deepinfer_kvtier.log.disk import DiskTier

_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]
_MAX_SURVEYS = 4

# Where a block is: numbers of `_names`. A further tier is _FURTHER + its position.
_HOST: Final = 0
_DISK: Final = 1
_FURTHER: Final = 2
_NOWHERE: Final = 255


@dataclass(slots=True)
class Question:
    """What one lookup is about."""

    layout: LayoutSpec
    shard: int
    probe: tuple[bytes, ...]
    needs_state: bool
    accept_approximate: bool


@dataclass(slots=True)
class _State:
    """The state slot found: at which boundary, in which tier, with which marks."""

    blocks: int = 0
    where: int = _NOWHERE
    marks: int = 0
    record: HostRecord | None = None
    row: NDArray[Any] | None = None


@dataclass(slots=True)
class _Survey:
    """One look at the tiers. Arrays have one item a block of the prefix.

    records: pinned host records, None for a block that is not in memory.
    where:   uint8, the tier of each block.
    marks:   uint8, approximate bit and replay generation of each block.
    rows:    directory rows; None when the directory was not asked.
    """

    records: list[HostRecord | None]
    where: NDArray[np.uint8]
    marks: NDArray[np.uint8]
    rows: NDArray[Any] | None = None
    state: _State = field(default_factory=_State)


def find_prefix(
    tiers: TierSet,
    layout: LayoutSpec,
    shard: int,
    counts: Counter[str],
    digests: tuple[bytes, ...],
    *,
    limit: int,
    prompt_tokens: int,
    exact: bool,
    lease_s: float,
    accept_approximate: bool,
    root: bytes,
) -> Match:
    """Everything behind `Namespace.match` after hashing. counts: those of the namespace."""
    needs_state = layout.payload_bytes("state") > 0
    question = Question(layout, shard, digests[:limit], needs_state, accept_approximate)
    survey = _look(tiers, question)
    short = len(survey.records) < limit or (exact and survey.state.blocks < len(survey.records))
    if short and limit and tiers.disk is not None and _refresh(tiers, tiers.disk):
        _unpin(tiers, survey)
        survey = _look(tiers, question)
    segments: list[int] | None = None
    for _ in range(_MAX_SURVEYS):
        try:
            segments = _pin_segments(tiers, survey)
        except OSError:
            break
        if segments is not None:
            break
        _unpin(tiers, survey)
        survey = _look(tiers, question)
    if segments is None:
        # The directory fails, or changes faster than we can look: what is in memory will do.
        _unpin(tiers, survey)
        survey = _look(tiers, question, host_only=True)
        segments = []
    if exact and tiers.peers is not None:
        # Once, when all else is settled: this is a round trip.
        number = _FURTHER + len(tiers.further)
        _look_deeper(tiers, tiers.peers, number, question, survey)
    match = _build(tiers, layout, digests, survey, segments, prompt_tokens, exact, lease_s, root)
    _account(tiers, layout, shard, counts, match, limit)
    tiers.sync_tiers()
    return match


def _refresh(tiers: TierSet, disk: DiskTier) -> bool:
    if disk.breaker.is_open or disk.liveness.shared:
        return False  # on a mounted file system the poller refreshes, and no request waits for it
    try:
        disk.refresh()
    except OSError:
        disk.breaker.error()
        tiers.counts["refresh_errors"] += 1
        return False
    return True


def _look(tiers: TierSet, question: Question, *, host_only: bool = False) -> _Survey:
    probe = question.probe
    records = tiers.host.pin_all(_BLOCK, probe)
    whole = None not in records
    if not whole:
        where = [_NOWHERE if record is None else _HOST for record in records]
        marks = [0 if record is None else record.marks for record in records]
        survey = _Survey(records, np.array(where, np.uint8), np.array(marks, np.uint8))
    else:
        here = cast("list[HostRecord]", records)
        marks = np.frombuffer(bytearray([record.marks for record in here]), np.uint8)
        survey = _Survey(records, np.zeros(len(here), np.uint8), marks)  # zero is _HOST
    if not host_only:
        _look_below(tiers, question, survey)
    if not (whole and question.accept_approximate):
        there = survey.where != _NOWHERE
        if not question.accept_approximate:
            there &= (survey.marks & APPROXIMATE_BIT) == 0
        prefix = len(probe) if there.all() else int(np.argmin(there))
        tiers.host.unpin(record for record in records[prefix:] if record is not None)
        survey.records = records[:prefix]
        survey.where, survey.marks = survey.where[:prefix], survey.marks[:prefix]
        if survey.rows is not None:
            survey.rows = survey.rows[:prefix]
    if question.needs_state and survey.records:
        _look_for_state(tiers, question, survey, host_only)
    return survey


def _look_below(tiers: TierSet, question: Question, survey: _Survey) -> None:
    """Ask the tiers below host memory for the blocks that are missing above them."""
    expected = question.layout.payload_bytes("block")
    disk = tiers.disk
    absent = survey.where == _NOWHERE
    if disk is not None and not disk.breaker.is_open and absent.any():
        survey.rows = disk.index.probe(_BLOCK, question.shard, question.probe)
        here = absent & _fits(survey.rows, expected)
        survey.where[here] = _DISK
        survey.marks[here] = survey.rows["flags"][here]
    for number, tier in enumerate(tiers.further):
        missing = np.flatnonzero(survey.where == _NOWHERE)
        if not len(missing):
            return
        found = tier.probe(_BLOCK, question.shard, [question.probe[i] for i in missing])
        fits = _fits(found, expected, tier)
        here = missing[fits]
        survey.where[here] = _FURTHER + number
        survey.marks[here] = found["flags"][fits]


def _look_for_state(tiers: TierSet, question: Question, survey: _Survey, host_only: bool) -> None:
    """The deepest boundary with a state slot; the faster tier is preferred at equal depth."""
    probe = question.probe[: len(survey.records)]
    survey.state = state = _state_in_host(tiers, question, probe)
    if host_only:
        return
    disk = tiers.disk
    expected = question.layout.payload_bytes("state")
    if disk is not None and not disk.breaker.is_open and state.blocks < len(probe):
        rows = disk.index.probe(_STATE, question.shard, probe[state.blocks :])
        at = _deepest(rows, _fits(rows, expected), question)
        if at is not None:
            _replace_state(tiers, survey, at, _DISK, rows)
            survey.state.row = rows[at : at + 1]
    for number, tier in enumerate(tiers.further):
        _look_deeper(tiers, tier, _FURTHER + number, question, survey)


def _look_deeper(
    tiers: TierSet, tier: GuardedTier, where: int, question: Question, survey: _Survey
) -> None:
    """Ask one tier for state slots behind the deepest one that is known."""
    deeper = question.probe[survey.state.blocks : len(survey.records)]
    if deeper:
        found = tier.probe(_STATE, question.shard, deeper)
        fits = _fits(found, question.layout.payload_bytes("state"), tier)
        at = _deepest(found, fits, question)
        if at is not None:
            _replace_state(tiers, survey, at, where, found)


def _state_in_host(tiers: TierSet, question: Question, probe: tuple[bytes, ...]) -> _State:
    for depth in range(len(probe), 0, -1):
        record = tiers.host.pin(_STATE, probe[depth - 1])
        if record is None:
            continue
        if record.approximate and not question.accept_approximate:
            tiers.host.unpin([record])
            continue
        return _State(depth, _HOST, record.marks, record)
    return _State()


def _fits(rows: NDArray[Any], expected: int, tier: GuardedTier | None = None) -> NDArray[np.bool_]:
    """Rows that can be records of so many bytes: what is stored of a compressed one is shorter."""
    if tier is None or tier.tier.caps.compressed:  # `NO_ROW` is longer than any record
        return rows["length"] <= expected
    return rows["length"] == expected


def _deepest(rows: NDArray[Any], there: NDArray[np.bool_], question: Question) -> int | None:
    if not question.accept_approximate:
        there &= (rows["flags"] & APPROXIMATE_BIT) == 0
    found = np.flatnonzero(there)
    return int(found[-1]) if len(found) else None


def _replace_state(
    tiers: TierSet, survey: _Survey, at: int, where: int, rows: NDArray[Any]
) -> None:
    """A deeper state slot was found, `at` boundaries behind the one known so far."""
    former = survey.state
    if former.record is not None:
        tiers.host.unpin([former.record])
    survey.state = _State(former.blocks + at + 1, where, int(rows["flags"][at]))


def _unpin(tiers: TierSet, survey: _Survey) -> None:
    held = [record for record in (*survey.records, survey.state.record) if record is not None]
    tiers.host.unpin(held)


def _pin_segments(tiers: TierSet, survey: _Survey) -> list[int] | None:
    """Hold the files behind the survey; None when one is gone, after forgetting its rows.

    raises: OSError for one that cannot be opened now; its rows stay, the file may be fine later.
    """
    disk = tiers.disk
    if disk is None:
        return []
    needed: set[int] = set()
    if survey.rows is not None:
        on_disk = survey.rows["segment"][survey.where == _DISK]
        needed.update(int(number) for number in np.unique(on_disk))
    if survey.state.row is not None:
        needed.add(int(survey.state.row["segment"][0]))
    taken: list[int] = []
    for local in sorted(needed):
        try:
            fd = disk.segments.acquire(local)
        except OSError:
            disk.breaker.error()
            _release(disk, taken)
            raise
        if fd is None:
            disk.index.forget_segment(disk.segments.get(local))
            _release(disk, taken)
            return None
        taken.append(local)
    return taken


def _release(disk: DiskTier, taken: Sequence[int]) -> None:
    for held in taken:
        disk.segments.release(held)


def _build(
    tiers: TierSet,
    layout: LayoutSpec,
    digests: tuple[bytes, ...],
    survey: _Survey,
    segments: list[int],
    prompt_tokens: int,
    exact: bool,
    lease_s: float,
    root: bytes,
) -> Match:
    names = ("host", "disk", *(tier.name for tier in tiers.readable))
    prefix = len(survey.records)
    state = _state_hit(layout, survey.state, names)
    n_blocks = survey.state.blocks if exact else prefix
    block_fuzzy, block_generation = fuzzy, generation = _worst(survey.marks)
    if n_blocks < prefix:
        fuzzy, generation = _worst(survey.marks[:n_blocks])
    if exact and state is not None:
        fuzzy |= state.approximate
        generation = max(generation, state.replay_generation)
    held = [record for record in (*survey.records, survey.state.record) if record is not None]
    return Match(
        n_blocks=n_blocks,
        n_tokens=n_blocks * layout.block_tokens,
        block_prefix=prefix,
        state=state,
        spans=spans_of(survey.where[:n_blocks], names, layout.payload_bytes("block")),
        digests=digests,
        approximate=fuzzy,
        replay_generation=generation,
        block_approximate=block_fuzzy,
        block_generation=block_generation,
        prompt_tokens=prompt_tokens,
        lease=tiers.leases.grant(held, segments, lease_s),
        lease_s=lease_s,
        root=root,
        _book=tiers.leases,
        _names=names,
        _where=survey.where,
        _marks=survey.marks,
        _records=tuple(survey.records),
        _state_record=survey.state.record,
        _rows=survey.rows,
        _state_row=survey.state.row,
    )


def _worst(marks: NDArray[np.uint8]) -> tuple[bool, int]:
    """Whether any block is approximate, and the deepest replay generation."""
    if not marks.any():
        return False, 0
    return bool((marks & APPROXIMATE_BIT).any()), int((marks & GENERATION_BITS).max())


def _state_hit(layout: LayoutSpec, state: _State, names: Sequence[str]) -> StateHit | None:
    if state.blocks == 0:
        return None
    return StateHit(
        n_blocks=state.blocks,
        n_tokens=state.blocks * layout.block_tokens,
        tier=names[state.where],
        bytes=layout.payload_bytes("state"),
        approximate=bool(state.marks & APPROXIMATE_BIT),
        replay_generation=state.marks & GENERATION_BITS,
    )


def _account(
    tiers: TierSet,
    layout: LayoutSpec,
    shard: int,
    counts_here: Counter[str],
    match: Match,
    limit: int,
) -> None:
    """Recency and counters; the head of a chain ends up younger than its tail."""
    tiers.host.used(
        Use(
            match.digests,
            match.block_prefix,
            match.prompt_tokens,
            layout.block_tokens,
            tiers.clock.monotonic(),
        )
    )
    state_digest: tuple[bytes, ...] = ()
    if match.state is not None:
        state_digest = (match.digests[match.state.n_blocks - 1],)
        tiers.host.used_state(*state_digest)
    if tiers.disk is not None:
        tiers.disk.touch(_BLOCK, shard, match.digests[: match.n_blocks])
        tiers.disk.touch(_STATE, shard, state_digest)
    for counts in (tiers.counts, counts_here):
        counts["matches"] += 1
        counts["prompt_tokens"] += match.prompt_tokens
        counts["hit_tokens"] += match.n_tokens
        counts["hit_blocks"] += match.n_blocks
        counts["missed_blocks"] += limit - match.n_blocks
        for span in match.spans:
            counts[f"hit_tokens_{span.tier}"] += span.count * layout.block_tokens
        if layout.payload_bytes("state") and limit:
            counts["state_hits" if match.state is not None else "state_misses"] += 1
            if match.state is not None:
                counts[f"state_hits_{match.state.tier}"] += 1
