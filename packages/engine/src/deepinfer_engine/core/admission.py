"""Who gets a place and memory next, and who has to make room for somebody more urgent."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from deepinfer_engine.core.durations import Durations
from deepinfer_engine.core.plan import Reservation
from deepinfer_engine.core.sequence import LiveSequence, Phase
from deepinfer_engine.core.sequences import Sequences

HOLD_S = 2.0
"""Room that was made for a prompt computed elsewhere is kept so long for whoever asked."""
MOST_RECOMPUTED = 3
"""Who was computed again so often makes room for nobody any more."""


@dataclass(slots=True)
class Claim:
    """Room that a request has asked for and that sequences of a worse class hold in a step that
    runs: it is made before the next one is planned."""

    priority: int
    blocks: int
    until: float | None = None
    """Set once it is made."""


@dataclass(slots=True)
class Admission:
    """Fair order with bounded overtaking, and reservations for prompts computed elsewhere."""

    at: Sequences
    queued: Durations = field(default_factory=lambda: Durations("queue"))
    """From a prompt's arrival until it has memory."""
    _claim: Claim | None = None

    def admit(self, now: float) -> list[LiveSequence]:
        """See `Scheduler.admit`."""
        at, order = self.at, self.at.order
        if at.role != "decode":
            self._claim = None
        if not at.waiting or not (at.has_place() or self._might_preempt()):
            return []
        admitted: list[LiveSequence] = []
        blocked: LiveSequence | None = None
        parked = min((order.level(seq, now) for seq in at.parked), default=None)
        ranked = [(self._rank(seq, now), seq.order, seq) for seq in at.waiting]
        heapq.heapify(ranked)
        while ranked:
            was, _, seq = heapq.heappop(ranked)
            rank = self._rank(seq, now)
            if rank != was:  # its user was served meanwhile
                heapq.heappush(ranked, (rank, seq.order, seq))
                continue
            if parked is not None and rank[0] >= parked:
                break  # those that were preempted come first in their class
            if blocked is not None and not self._may_overtake(blocked, now):
                break
            if self._take_in(seq) or (self._make_room(seq, now) and self._take_in(seq)):
                if not seq.preemptions:
                    seq.queued_s = now - seq.arrival
                    self.queued.observe(seq.queued_s)
                if seq.original is None:
                    admitted.append(seq)
                if blocked is not None:
                    blocked.overtaken += 1
            elif not at.has_place():
                break
            elif blocked is None:
                blocked = seq
                if seq.blocked_since is None:
                    seq.blocked_since = now
        return admitted

    def reserve(self, prompt_len: int, priority: int) -> Reservation | None:
        """See `Scheduler.reserve`."""
        at = self.at
        need = at.blocks_for(prompt_len)
        if any(seq.priority <= priority for seq in at.parked):
            return None
        may = self._fits(need) and at.in_time(prompt_len)
        taken = at.pools.take(need) if may else None
        if taken is None:
            # A step may be running: its sequences make room when it is over.
            if self._claim is None or priority < self._claim.priority:
                self._claim = Claim(priority, need)
            return None
        self._claim = None
        reservation = Reservation(prompt_len, *taken)
        at.reservations.add(reservation)
        return reservation

    def before_step(self, now: float) -> bool:
        """Make the room that was asked for, else let those go on that made room before. False: a
        step that runs must be over first."""
        claim = self._claim
        if claim is not None and claim.until is None:
            victims = self._victims(claim.priority, now, claim.blocks)
            if any(seq.in_use for seq in victims):
                return False
            made = bool(victims) and all(self.at.preempt_for(seq) for seq in victims)
            claim.until = now + HOLD_S if made else now
        if claim is not None and claim.until is not None and now >= claim.until:
            self._claim = None
        if self._claim is None:
            self._resume_parked(now)
        return True

    def _fits(self, need: int) -> bool:
        at = self.at
        return at.has_place() and need + at.growth_reserve() <= at.pools.blocks.free

    def _resume_parked(self, now: float) -> None:
        at = self.at
        while at.parked and at.has_place():
            seq = min(at.parked, key=lambda s: at.order.level(s, now))
            need = at.blocks_for(seq.num_tokens + 1)
            spare = at.growth_reserve() if at.running else 0
            if need + spare > at.pools.blocks.free or not at.in_time(len(seq.tokens)):
                return
            taken = at.pools.take(need)
            if taken is None:
                return
            at.resume(seq, taken)

    def _rank(self, seq: LiveSequence, now: float) -> tuple[float, ...]:
        """The fair order; among one user's, those that can be in time before those that cannot."""
        level, first, key, user, *rest = self.at.order.rank(seq, now)
        late = self.at.first.slack(seq.arrival, seq.prompt_len, now) < 0
        return (level, first, key, user, late, *rest)

    def _may_overtake(self, blocked: LiveSequence, now: float) -> bool:
        since = now if blocked.blocked_since is None else blocked.blocked_since
        config = self.at.config
        return blocked.overtaken < config.skip_ahead and now - since < config.hol_s

    def _need(self, seq: LiveSequence, original: LiveSequence | None) -> int:
        shared = 0 if original is None else (seq.prompt_len - 1) // self.at.block_tokens
        return self.at.blocks_for(seq.prompt_len) - shared

    def _take_in(self, seq: LiveSequence) -> bool:
        """Memory for a waiting prompt; False when there is none now."""
        at = self.at
        original = at.twins.original(seq)
        need = self._need(seq, original)
        if not (self._fits(need) and at.in_time(seq.prompt_len)):
            return False
        taken = at.pools.take(need)
        if taken is None:
            return False
        seq.blocks, seq.state_slot = taken
        seq.to(Phase.ADMITTED)
        at.waiting.remove(seq)
        at.prefilling.append(seq)
        at.order.admitted(seq)
        at.order.charge(seq.salt, seq.prompt_len)
        if original is None:
            seq.users += 1
            at.twins.read(seq)
        else:
            seq.original = original
            original.forks.append(seq)
        return True

    # -- for the urgent -------------------------------------------------------------------------

    def _make_room(self, seq: LiveSequence, now: float) -> bool:
        """Preempt whoever runs in a worse class. Who has waited long is not more urgent by that,
        and who arrived long ago does not lose its place."""
        need = self._need(seq, self.at.twins.original(seq))
        victims = self._victims(seq.priority, now, need)
        if any(victim.in_use for victim in victims):
            self._claim = Claim(seq.priority, need)
            return False
        return bool(victims) and all(self.at.preempt_for(victim) for victim in victims)

    def _might_preempt(self) -> bool:
        """Whether anybody waits who is in a better class than somebody that runs."""
        best = min(seq.priority for seq in self.at.waiting)
        return any(seq.priority > best for seq in self.at.running)

    def _victims(self, priority: int, now: float, need: int) -> list[LiveSequence]:
        """The fewest that are enough, worst class and longest output first; none where all of them
        would not be."""
        at = self.at
        worse = [
            seq
            for seq in at.running
            if seq.priority > priority
            and at.order.level(seq, now) > priority
            and seq.preemptions < MOST_RECOMPUTED
        ]
        worse.sort(key=lambda s: (s.priority, s.output_len, s.order))
        free, chosen = at.pools.blocks.free - at.growth_reserve(), list[LiveSequence]()

        def enough() -> bool:
            return need <= free and at.active() - len(chosen) < at.config.max_num_seqs

        while worse and not enough():
            chosen.append(worse.pop())
            free += len(chosen[-1].blocks)
        return chosen if enough() else []
