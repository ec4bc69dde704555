"""Which segments leave, and why: pure decisions over a survey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from deepinfer_kvtier.config import KVTierConfig
from deepinfer_kvtier.retention import RetentionClass
from deepinfer_kvtier.upkeep.survey import SegmentState, Survey

SPARSE_SHARE = 0.2
"""Below this share of living bytes a segment is rewritten instead of kept."""


def choose_expired(
    states: Iterable[SegmentState], classes: Mapping[str, RetentionClass], now_s: float
) -> list[SegmentState]:
    """Segments whose every record is past its time to live; unknown classes never expire."""
    gone: list[SegmentState] = []
    for state in states:
        policy = classes.get(state.cls)
        expired = policy is not None and policy.is_over(now_s - state.last_seen_s)
        if state.deletable and (state.records == 0 or expired):
            gone.append(state)
    return gone


def choose_sparse(states: Iterable[SegmentState]) -> list[SegmentState]:
    """Segments mostly dead: their living records move, emptiest first, and the file goes."""
    sparse = [
        state
        for state in states
        if state.deletable
        and not state.growing
        and 0 < state.alive_bytes < SPARSE_SHARE * state.bytes
    ]
    return sorted(sparse, key=lambda state: state.alive_bytes / state.bytes)


def choose_victims(
    states: Iterable[SegmentState],
    excess_bytes: int,
    ranks: Mapping[str, int],
    kept_bytes: Mapping[int, int] = MappingProxyType({}),
) -> list[SegmentState]:
    """Segments to evict until `excess_bytes` are free: lowest rank first, then longest unused.

    Classes without an entry in `ranks` (those that never expire) are never evicted.
    kept_bytes: what is written again of a segment, by its number.
    """
    candidates = [state for state in states if state.deletable and state.cls in ranks]
    candidates.sort(key=lambda state: (ranks[state.cls], state.last_seen_s))
    victims: list[SegmentState] = []
    for state in candidates:
        if excess_bytes <= 0:
            break
        victims.append(state)
        excess_bytes -= state.bytes - kept_bytes.get(state.local, 0)
    return victims


def class_ranks(classes: Mapping[str, RetentionClass]) -> dict[str, int]:
    """Shorter-lived classes are evicted first."""
    mortal = [(policy.ttl_s, name) for name, policy in classes.items() if policy.ttl_s is not None]
    return {name: rank for rank, (_, name) in enumerate(sorted(mortal))}


def over_limit(config: KVTierConfig, quota: int | None, used: int) -> int:
    """Bytes to free: none up to the high-water mark, down to the low one above it."""
    if quota is None or used <= config.high_water * quota:
        return 0
    return used - int(config.low_water * quota)


def over_class_quotas(
    config: KVTierConfig, survey: Survey, kept_bytes: Mapping[int, int] = MappingProxyType({})
) -> tuple[list[SegmentState], dict[str, int]]:
    """Victims within classes that have a quota, and by class the bytes that no victim can free."""
    ranks = class_ranks(config.classes)
    victims: list[SegmentState] = []
    stuck: dict[str, int] = {}
    for cls, quota in config.class_quotas.items():
        members = [state for state in survey.states if state.cls == cls]
        excess = over_limit(config, quota, survey.bytes_of(cls))
        chosen = choose_victims(members, excess, ranks, kept_bytes)
        left = excess - sum(state.bytes - kept_bytes.get(state.local, 0) for state in chosen)
        if left > 0:
            stuck[cls] = left
        victims.extend(chosen)
    return victims, stuck
