"""Which running sequences the next step serves, with how many drafts and which new blocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.sequences import Sequences
from deepinfer_engine.core.stop import draft_room

Rows = list[tuple[LiveSequence, int]]


@dataclass(slots=True)
class DecodeBatch:
    """Rows of decode steps. Memory is reserved for the most that steps ahead may commit."""

    at: Sequences
    _most: int = field(init=False)
    """Drafts that a sequence may verify now."""
    _growth: int = field(init=False)
    """Blocks that a step takes for one sequence at most."""

    def __post_init__(self) -> None:
        self._most = self.at.caps.nextn
        self._growth = self.at.blocks_for(2 * (1 + self.at.caps.nextn)) + 1

    def rows(self) -> Rows | None:
        """Serve the best class and in it the shortest output first; where memory lacks, preempt the
        worst class and in it the longest output. None: memory lacks, and who could give it is in a
        step that runs."""
        at = self.at
        able = [seq for seq in at.running if self._goes_on(seq)]
        if at.role == "both" and at.in_flight:
            able += [
                seq
                for seq in at.prefilling
                if seq.users and seq.planned >= seq.prompt_len and self._goes_on(seq)
            ]
        if at.tokens.target:
            self._most = at.tokens.drafts(len(able), sum(len(seq.tokens) for seq in able))
        if len(able) * self._growth <= at.pools.blocks.free:
            rows = [(seq, self._grow(seq) or 0) for seq in able]  # enough for everybody
        else:
            served = self._served(able)
            if served is None:
                return None
            rows = served
        rows.sort(key=lambda row: (-len(row[0].tokens), row[0].order))
        return rows

    def _served(self, able: list[LiveSequence]) -> Rows | None:
        level = self.at.order.level
        order = deque(sorted(able, key=lambda s: (level(s, s.arrival), s.output_len, s.order)))
        rows: Rows = []
        while order:
            seq = order.popleft()
            while (drafts := self._grow(seq)) is None:
                victim = order.pop() if order else seq
                if victim.in_use:
                    return None
                self.at.preempt(victim)
                if victim is seq:
                    break
            else:
                rows.append((seq, drafts))
        return rows

    def _goes_on(self, seq: LiveSequence) -> bool:
        """Whether a step that runs may leave something to do."""
        if seq.finish_reason is not None or seq.aborting:
            return False
        if not seq.ahead:
            return True
        return len(seq.tokens) + seq.ahead < seq.most_tokens

    def _grow(self, seq: LiveSequence) -> int | None:
        """Blocks for anchor and drafts; rather fewer drafts than no step. None: no block left."""
        at = self.at
        drafts = draft_room(self._most, len(seq.tokens) + seq.ahead, seq.most_tokens)
        most = len(seq.tokens) + seq.ahead_most
        if most + drafts <= len(seq.blocks) * at.block_tokens:
            return drafts
        for n in range(at.blocks_for(most + drafts) - len(seq.blocks), 0, -1):
            taken = at.pools.blocks.take(n)
            if taken is not None:
                seq.blocks += taken
                break
        room = len(seq.blocks) * at.block_tokens - most
        return None if room < 0 else min(drafts, room)
