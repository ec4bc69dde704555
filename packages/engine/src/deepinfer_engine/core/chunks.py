"""Which prompts the next step reads, how much of each, and which states it keeps on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.fairness import FairOrder
from deepinfer_engine.core.pacing import LEAST, Pace
from deepinfer_engine.core.plan import Chunk, Plan
from deepinfer_engine.core.pools import Pools
from deepinfer_engine.core.runner import Caps
from deepinfer_engine.core.sequence import LiveSequence, Phase
from deepinfer_engine.core.targets import FirstTokenTarget, TokenTarget


class Reader:
    """Cuts prompts into chunks within the token budget and the pace."""

    def __init__(
        self,
        caps: Caps,
        block_tokens: int,
        config: EngineConfig,
        pools: Pools,
        order: FairOrder,
        tokens: TokenTarget,
        first: FirstTokenTarget,
        *,
        keep_snapshots: bool,
        alone: bool,
    ) -> None:
        """alone: nothing else runs here that could be held up."""
        self._caps = caps
        self._size = block_tokens
        self._config = config
        self._pools = pools
        self._order = order
        self._keep_snapshots = keep_snapshots
        self._tokens, self._first = tokens, first
        gap = config.max_gap or (math.inf if tokens.target else 0.0)
        self._pace = Pace(0.0 if alone else gap)
        self._last: float | None = None
        self._over: Plan | None = None

    def tick(self, now: float) -> None:
        """A step is about to be planned: the one that was settled last took until now."""
        if self._over is not None and self._last is not None:
            over = self._over
            position = over.chunks[0].start if over.chunks else 0
            took, rows = now - self._last, len(over.rows)
            self._pace.took(rows, over.prompt_tokens, took, position)
            if over.chunks:
                self._first.step(over.prompt_tokens, took)
            else:
                self._tokens.step(rows, over.context, over.verified, took)
                self._pace.limit = self._tokens.step_seconds()
        self._over = None
        self._last = now

    def settled(self, plan: Plan) -> None:
        """A step is over; by the next `tick` it is known how long it took."""
        self._over = plan

    def reads(self, seq: LiveSequence) -> bool:
        """Whether a step may read more of it now."""
        most = seq.prompt_len - 1 if seq.forks else seq.prompt_len
        return seq.phase is Phase.PREFILLING and seq.planned < most and not seq.aborting

    def chunks(
        self, ready: Sequence[LiveSequence], rows: Sequence[tuple[LiveSequence, int]], now: float
    ) -> tuple[Chunk, ...]:
        """Chunks beside these rows; none where the budget, or the pace, leaves nothing.

        The first in order gets half of it at least, so that it ends; the rest goes to those with
        least left to read, so that a short prompt does not wait behind a long one. With a target
        for first tokens those that can be in time come before all others, the most pressed of them
        before the rest; the first in order then gets a quarter.
        """
        if not ready:
            return ()
        # One sequence's drafts are tokens of the step, too.
        used = sum(1 + drafts for _, drafts in rows)
        budget = self._config.max_num_batched_tokens - used
        first, *others = sorted(ready, key=lambda s: (self._order.level(s, now), s.order))
        budget = self._pace.tokens(len(rows), max(budget, LEAST), first.planned)
        # Beside others chunks are small, and any position is as good as another.
        grain = 1 if rows and self._pace.gap else self._size
        pressed = self._pressed(ready, now)
        others.sort(key=lambda s: (self._order.level(s, now), s.prompt_len - s.planned, s.order))
        if pressed:
            behind = [seq for seq in others if seq not in pressed]
            others = [seq for seq in pressed if seq is not first] + behind
        wanted = sum(self._left(seq) for seq in others)
        if pressed and pressed[0] is first:
            part = budget
        else:
            part = budget // 4 if pressed else budget // 2
        share = max(part, min(grain, budget), budget - wanted)
        cuts: list[Chunk] = []
        for seq, most in [(first, share), *((seq, budget) for seq in others)]:
            end = self._cut(seq, min(most, budget), grain)
            if end > seq.planned:
                budget -= end - seq.planned
                cuts.append(self._chunk(seq, end))
        return tuple(cuts)

    def _pressed(self, ready: Sequence[LiveSequence], now: float) -> list[LiveSequence]:
        """Those of the best class there is whose first token can be in time, the most pressed
        first; none without a target."""
        if not self._first.target:
            return []
        slack = {seq: self._first.slack(seq.arrival, self._left(seq), now) for seq in ready}
        best = min(self._order.level(seq, now) for seq in ready)
        return sorted(
            (s for s in ready if slack[s] >= 0 and self._order.level(s, now) == best),
            key=lambda s: (slack[s], s.order),
        )

    def _left(self, seq: LiveSequence) -> int:
        return seq.prompt_len - bool(seq.forks) - seq.planned

    def _cut(self, seq: LiveSequence, tokens: int, grain: int) -> int:
        """Where a chunk of at most so many tokens ends."""
        if self._left(seq) <= tokens:
            return seq.planned + self._left(seq)
        return (seq.planned + tokens) // grain * grain

    def _chunk(self, seq: LiveSequence, end: int) -> Chunk:
        first = seq.planned // self._size + 1
        borders = [b * self._size for b in range(first, end // self._size + 1)]
        whole = self._caps.snapshot_from(seq.prompt_len)
        if seq.prefix.replayed:
            # Within a replay only its end is whole.
            whole = max(whole, seq.prefix.n_tokens)
        recent = seq.prompt_len - self._config.prompt_windows * self._size
        wanted = {*seq.wanted_borders, seq.prefix.n_tokens}
        borders = [p for p in borders if p >= whole and (p > recent or p in wanted)]
        # Spare slots are few: the borders nearest the end of the prompt serve the next turn best.
        n = min(len(borders), self._pools.states.free) if self._keep_snapshots else 0
        slots = self._pools.states.take(n) or []
        borders.sort(key=lambda position: (position in seq.wanted_borders, position))
        snapshots = tuple(zip(sorted(borders[len(borders) - n :]), slots, strict=True))
        return Chunk(seq, seq.planned, end, snapshots)
