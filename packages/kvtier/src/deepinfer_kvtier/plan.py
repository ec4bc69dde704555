"""Replay planner: how much of a match to load, and where the window state comes from.

Total time of a cut after k blocks = load time + state term + time to compute the rest. The cut with
the least total wins; at equal cost the deeper one, which leaves more of the machine to others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deepinfer_kvtier.errors import ConfigError

ReplayMode = Literal["bounded", "exact", "none"]
StateSource = Literal["tier", "replay", "exact_replay", "start", "none"]


def _default_tiers() -> dict[str, tuple[float, float]]:
    return {"host": (20e-6, 5e9), "disk": (200e-6, 2e9)}


@dataclass(frozen=True, slots=True)
class Cost:
    """What loading and computing cost on this machine.

    prefill_tok_s:        tokens a second of prefill without hits.
    replay_tokens:        tokens a bounded replay computes again for window state only.
    exact_replay_tokens:  tokens after which rebuilt window state is exact.
    tiers:                tier -> (latency in seconds, bytes a second).
    max_replay_generation: beyond this many bounded replays in a row only exact state is used.
    """

    prefill_tok_s: float = 60e3
    replay_tokens: int = 128
    exact_replay_tokens: int = 2560
    tiers: Mapping[str, tuple[float, float]] = field(default_factory=_default_tiers)
    max_replay_generation: int = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen cut.

    n_blocks, n_tokens: load this many blocks; the engine continues at token `n_tokens`.
    state:        "tier" = load the state slot at this boundary, "replay" = rebuild windows from the
                  last `replay_tokens` cached tokens (approximate), "exact_replay" likewise but long
                  enough to be exact, "start" = nothing cached is used, "none" = no state is needed.
    replay_tokens: cached tokens to compute again as queries; their stored blocks stay as they are.
    approximate:  records computed from here on must be put with `approximate=True`.
    seconds:      predicted total.
    """

    n_blocks: int
    n_tokens: int
    state: StateSource
    replay_tokens: int
    approximate: bool
    replay_generation: int
    seconds: float


def choose_cut(
    *,
    prompt_tokens: int,
    block_tokens: int,
    block_bytes: int,
    tiers: Sequence[str],
    state_at: Mapping[int, tuple[str, int, bool, int]],
    needs_state: bool,
    generation: int,
    approximate: bool,
    mode: ReplayMode,
    cost: Cost,
) -> Plan:
    """Pure decision behind `Namespace.plan`.

    tiers:    tier of every matched block, first to last.
    state_at: boundary in blocks -> (tier, bytes, approximate, replay generation).
    generation, approximate: deepest replay generation among the blocks, and whether any is
                             approximate.
    """
    if cost.prefill_tok_s <= 0:
        raise ConfigError(f"prefill_tok_s must be above 0, got {cost.prefill_tok_s}")
    candidates = {0, len(tiers), *state_at}
    candidates |= {i for i in range(1, len(tiers)) if tiers[i] != tiers[i - 1]}
    best: Plan | None = None
    for cut in sorted(candidates):
        if cut > len(tiers):
            continue
        for option in _options(
            cut, block_tokens, state_at, needs_state, generation, approximate, mode, cost
        ):
            source, replayed, fuzzy, depth = option
            load = _load_seconds(tiers[:cut], block_bytes, cost)
            if source == "tier":
                tier, size, _, _ = state_at[cut]
                latency, rate = cost.tiers.get(tier, (0.0, float("inf")))
                load += latency + size / rate
            rest = prompt_tokens - cut * block_tokens + replayed
            total = load + rest / cost.prefill_tok_s
            if best is None or total <= best.seconds:
                best = Plan(cut, cut * block_tokens, source, replayed, fuzzy, depth, total)
    assert best is not None  # cut 0 always has an option
    return best


def _options(
    cut: int,
    block_tokens: int,
    state_at: Mapping[int, tuple[str, int, bool, int]],
    needs_state: bool,
    generation: int,
    approximate: bool,
    mode: ReplayMode,
    cost: Cost,
) -> list[tuple[StateSource, int, bool, int]]:
    if cut == 0:
        return [("start", 0, False, 0)]
    if mode == "exact" and approximate:
        return []
    if not needs_state:
        return [("none", 0, approximate, generation)]
    options: list[tuple[StateSource, int, bool, int]] = []
    cached = cut * block_tokens
    if mode != "none" and cached >= cost.exact_replay_tokens:
        options.append(("exact_replay", cost.exact_replay_tokens, approximate, generation))
    if mode == "bounded" and cached >= cost.replay_tokens:
        following = generation + 1
        if following <= cost.max_replay_generation:
            options.append(("replay", cost.replay_tokens, True, following))
    state = state_at.get(cut)
    if state is not None and not (mode == "exact" and state[2]):
        fuzzy = approximate or state[2]
        options.append(("tier", 0, fuzzy, max(generation, state[3])))
    return options


def _load_seconds(tiers: Sequence[str], block_bytes: int, cost: Cost) -> float:
    """Different tiers are read at the same time, so the slowest one decides."""
    slowest = 0.0
    for tier in set(tiers):
        latency, rate = cost.tiers.get(tier, (0.0, float("inf")))
        slowest = max(slowest, latency + tiers.count(tier) * block_bytes / rate)
    return slowest
