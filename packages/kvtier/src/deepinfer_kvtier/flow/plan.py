"""Replay planner: how much of a match to load, and where the window state comes from.

For a cut after k of the matched blocks, with N prompt tokens and B tokens a block:

    load(k)    = sum over tiers of latency + bytes / rate  (spans of a tier share one latency)
    compute(n) = n / prefill_tok_s
    total(k)   = max(load(k), overlap) + state(k) + compute(N - B k)

state(k) is the load of the stored slot at k (nothing but its copy in own memory, a pull from a
peer), compute(replay_tokens) for bounded replay, compute(exact_replay_tokens) for exact replay. The
least total wins; at equal cost the deeper cut, which leaves more of the machine to others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.values import GENERATION_BITS

ReplayMode = Literal["bounded", "exact", "none"]
StateSource = Literal["tier", "replay", "exact_replay", "start", "none"]

UNKNOWN_TIER = (20e-3, 200e6)
"""Of a tier nobody has measured yet: slow, so that only long spans are loaded from it."""


def _default_tiers() -> dict[str, tuple[float, float]]:
    return {
        "host": (20e-6, 5e9),
        "disk": (200e-6, 2e9),
        "peer": (1e-3, 1e9),
        "mooncake": (1e-3, 2e9),
        "s3": (50e-3, 500e6),
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """What loading and computing cost on this machine.

    prefill_tok_s:        tokens a second of prefill without hits.
    replay_tokens:        tokens a bounded replay computes again for window state only.
    exact_replay_tokens:  tokens after which rebuilt window state is exact.
    tiers:                tier -> (latency in seconds, bytes a second); "peer" is another machine.
    max_replay_generation: beyond this many bounded replays in a row only exact state is used.
    overlap_s:            seconds of other work that goes on meanwhile: a load that is shorter
                          costs nothing more.
    """

    prefill_tok_s: float = 60e3
    replay_tokens: int = 128
    exact_replay_tokens: int = 2560
    tiers: Mapping[str, tuple[float, float]] = field(default_factory=_default_tiers)
    max_replay_generation: int = 8
    overlap_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prefill_tok_s <= 0:
            raise ConfigError(f"prefill_tok_s must be above 0, got {self.prefill_tok_s}")
        for tier, (latency, rate) in self.tiers.items():
            if latency < 0 or rate <= 0:
                raise ConfigError(
                    f"tier {tier!r} needs a latency >= 0 and a rate > 0, got {latency}, {rate}"
                )

    def load_seconds(self, tier: str, nbytes: int) -> float:
        """Time to load `nbytes` in one span; 0 for none."""
        latency, rate = self.tiers.get(tier, UNKNOWN_TIER)
        return latency + nbytes / rate if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen cut.

    n_blocks, n_tokens: load this many blocks; the engine continues at token `n_tokens`.
    state:        "tier" = load the state slot at this boundary, "replay" = rebuild windows from the
                  last `replay_tokens` cached tokens (approximate), "exact_replay" likewise but long
                  enough to be exact, "start" = nothing cached is used, "none" = no state is needed.
    replay_tokens: cached tokens to compute again as queries; their stored blocks stay as they are.
    approximate:  records computed from here on must be put with `approximate=True`.
    replay_generation: and with this `replay_generation`.
    seconds:      predicted total.
    """

    n_blocks: int
    n_tokens: int
    state: StateSource
    replay_tokens: int
    approximate: bool
    replay_generation: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state slot at some boundary of the match, and what loading it brings."""

    tier: str
    nbytes: int
    approximate: bool
    generation: int


@dataclass(frozen=True, slots=True)
class BlockQuality:
    """Of one block: whether it was computed from approximate windows, and how many replays deep."""

    approximate: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True)
class _Option:
    state: StateSource
    replay_tokens: int
    approximate: bool
    generation: int
    seconds: float


def choose_cut(
    *,
    prompt_tokens: int,
    block_tokens: int,
    block_bytes: int,
    tiers: Sequence[str],
    state_at: Mapping[int, StoredState],
    needs_state: bool,
    marks: Sequence[BlockQuality],
    mode: ReplayMode,
    cost: Cost,
) -> Plan:
    """Pure decision behind `Namespace.plan`.

    tiers:    tier of every matched block, first to last.
    state_at: stored states by boundary, in blocks.
    marks:    one for each matched block.
    """
    situation = _Situation(
        block_tokens, block_bytes, tiers, state_at, needs_state, marks, mode, cost
    )
    best: Plan | None = None
    for cut in sorted(situation.candidates()):
        load = max(situation.load_seconds(cut), cost.overlap_s)
        rest = (prompt_tokens - cut * block_tokens) / cost.prefill_tok_s
        for option in situation.options(cut):
            total = load + option.seconds + rest
            if best is None or total <= best.seconds:
                best = Plan(
                    cut,
                    cut * block_tokens,
                    option.state,
                    option.replay_tokens,
                    option.approximate,
                    option.generation,
                    total,
                )
    assert best is not None  # cut 0 always has an option
    return best


class _Situation:
    """One decision: the match in running sums, so that each cut costs little."""

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        tiers: Sequence[str],
        state_at: Mapping[int, StoredState],
        needs_state: bool,
        marks: Sequence[BlockQuality],
        mode: ReplayMode,
        cost: Cost,
    ) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._tiers = tiers
        self._state_at = state_at
        self._needs_state = needs_state
        self._mode = mode
        self._cost = cost
        self._borders = [i for i in range(1, len(tiers)) if tiers[i] != tiers[i - 1]]
        self._worst: list[BlockQuality] = [BlockQuality()]
        for mark in marks:
            last = self._worst[-1]
            self._worst.append(
                BlockQuality(
                    last.approximate or mark.approximate, max(last.generation, mark.generation)
                )
            )

    def candidates(self) -> set[int]:
        """Cuts among which the best one is: between two neighbours of them the total is a line.

        Its slope changes at tier borders, where a load outgrows what hides it, and where the marks
        of the prefix get worse. Where a replay becomes possible the line begins, but there it costs
        as much as all that is cached: never less than the cut 0.
        """
        n = len(self._tiers)
        found = {0, n, *self._borders, *(k for k in self._state_at if k <= n)}
        found |= {k for k in range(n) if self._worst[k] != self._worst[k + 1]}
        if self._cost.overlap_s > 0:
            found |= {k for edge in self._hidden_until() for k in (edge, edge + 1)}
        return {k for k in found if 0 <= k <= n}

    def load_seconds(self, cut: int) -> float:
        """Loads of different tiers follow each other; of one tier they share one latency."""
        counts: dict[str, int] = {}
        start = 0
        for border in (*self._borders, len(self._tiers)):
            if start >= cut:
                break
            tier = self._tiers[start]
            counts[tier] = counts.get(tier, 0) + min(border, cut) - start
            start = border
        return sum(
            self._cost.load_seconds(tier, count * self._block_bytes)
            for tier, count in counts.items()
        )

    def options(self, cut: int) -> Iterator[_Option]:
        """Ways to have window state at this cut; none when the mode forbids them all."""
        if cut == 0:
            yield _Option("start", 0, False, 0, 0.0)
            return
        cost, mark = self._cost, self._worst[cut]
        if self._mode == "exact" and mark.approximate:
            return
        if not self._needs_state:
            yield _Option("none", 0, mark.approximate, mark.generation, 0.0)
            return
        cached = cut * self._block_tokens
        if self._mode != "none" and cached >= cost.exact_replay_tokens:
            yield self._replay("exact_replay", cost.exact_replay_tokens, mark)
        following = mark.generation + 1
        if (
            self._mode == "bounded"
            and cached >= cost.replay_tokens
            and following <= cost.max_replay_generation
        ):
            after = BlockQuality(True, min(following, GENERATION_BITS))
            yield self._replay("replay", cost.replay_tokens, after)
        state = self._state_at.get(cut)
        if state is not None and not (self._mode == "exact" and state.approximate):
            yield _Option(
                "tier",
                0,
                mark.approximate or state.approximate,
                max(mark.generation, state.generation),
                cost.load_seconds(state.tier, state.nbytes),
            )

    def _replay(self, how: StateSource, tokens: int, after: BlockQuality) -> _Option:
        seconds = tokens / self._cost.prefill_tok_s
        return _Option(how, tokens, after.approximate, after.generation, seconds)

    def _hidden_until(self) -> Iterator[int]:
        """In each span, the last cut whose load is still hidden by the overlap."""
        start = 0
        for border in (*self._borders, len(self._tiers)):
            low, high = start, border
            while low < high:
                middle = (low + high + 1) // 2
                if self.load_seconds(middle) <= self._cost.overlap_s:
                    low = middle
                else:
                    high = middle - 1
            yield low
            start = border


WEIGHT = 0.2
"""Of the newest observation in the exponential averages."""
HALF_LIFE_S = 30.0  # of what loads have shown
SMALL_BYTES = 64 << 10
"""Loads below this size say something about latency, larger ones about the rate."""


class CostModel:
    """Exponential averages of observed loads over a starting `Cost`. Thread-safe."""

    def __init__(self, start: Cost | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._start, self.observations = start or Cost(), 0
        self._seen: dict[str, tuple[float, float, float]] = {}  # (latency, rate, when)

    def current(self) -> Cost:
        """The model as it stands."""
        seen = {tier: self._faded(tier) for tier in self._seen}
        return replace(self._start, tiers={**self._start.tiers, **seen})

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` from one tier alone took `seconds`."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            latency, rate = self._faded(tier)
            if nbytes < SMALL_BYTES:
                latency = _blend(latency, max(0.0, seconds - nbytes / rate))
            else:
                # A load as short as the latency believed in shows that the latency was less.
                latency = min(latency, seconds / 2)
                # Times are averaged, not rates: one lucky load must not hide many slow ones.
                rate = 1 / _blend(1 / rate, (seconds - latency) / nbytes)
            self._seen = {**self._seen, tier: (latency, rate, self._clock())}
            self.observations += 1

    def _faded(self, tier: str) -> tuple[float, float]:
        """What a tier showed fades: while it seems too slow, no load would tell otherwise."""
        start = self._start.tiers.get(tier, UNKNOWN_TIER)
        latency, rate, when = self._seen.get(tier, (*start, 0.0))
        kept = 0.5 ** ((self._clock() - when) / HALF_LIFE_S)
        return _blend(start[0], latency, kept), 1 / _blend(1 / start[1], 1 / rate, kept)


def _blend(old: float, new: float, weight: float = WEIGHT) -> float:
    return old + weight * (new - old)
