"""Every sequence of one worker: its queue, the memory it owns, how it comes and goes."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.fairness import FairOrder
from deepinfer_engine.core.plan import Parking, Progress, Reservation, Role
from deepinfer_engine.core.pools import Pools
from deepinfer_engine.core.runner import Caps
from deepinfer_engine.core.sequence import LiveSequence, Phase
from deepinfer_engine.core.targets import FirstTokenTarget, TokenTarget
from deepinfer_engine.core.twins import Twins
from deepinfer_engine.core.types import FinishReason
from deepinfer_engine.errors import RequestError


@dataclass(slots=True)
class Sequences:
    """What the parts of the scheduler share. Changes phases; decides nothing."""

    caps: Caps
    block_tokens: int
    config: EngineConfig
    role: Role
    parking: Parking
    pools: Pools
    order: FairOrder
    tokens: TokenTarget
    first: FirstTokenTarget
    twins: Twins = field(default_factory=Twins)
    counters: Counter[str] = field(default_factory=Counter[str])
    by_key: dict[str, LiveSequence] = field(default_factory=dict[str, LiveSequence])
    waiting: deque[LiveSequence] = field(default_factory=deque[LiveSequence])
    prefilling: list[LiveSequence] = field(default_factory=list[LiveSequence])
    running: list[LiveSequence] = field(default_factory=list[LiveSequence])
    parked: deque[LiveSequence] = field(default_factory=deque[LiveSequence])
    reservations: set[Reservation] = field(default_factory=set[Reservation])
    ended: list[Progress] = field(default_factory=list[Progress])
    """Ends that no step reports."""
    in_flight: int = 0
    """Steps that are planned and not yet settled."""
    arrivals: int = 0
    ends: int = 0
    """How often one that a step uses ended, or was told to."""

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def active(self) -> int:
        """Sequences that prefill, decode, or hold memory to do so."""
        return len(self.prefilling) + len(self.running) + len(self.reservations)

    def has_place(self) -> bool:
        return self.active() < self.config.max_num_seqs

    def context(self) -> int:
        """Tokens of those that are active."""
        here = sum(len(seq.tokens) for seq in (*self.prefilling, *self.running))
        return here + sum(one.prompt_len for one in self.reservations)

    def in_time(self, tokens: int) -> bool:
        """Whether tokens stay within their target with one more sequence of this length."""
        if not self.tokens.target or self.role == "prefill":
            return True
        return self.tokens.admits(self.active(), self.context(), tokens)

    def growth_reserve(self) -> int:
        """Blocks to leave free for running sequences when one more is admitted."""
        active = self.active() + len(self.parked)
        if self.role == "prefill" or active == 0:
            return 0
        return self.blocks_for((active + 1) * self.config.decode_reserve_tokens)

    # -- coming and going -----------------------------------------------------------------------

    def enter(self, seq: LiveSequence) -> None:
        if seq.key in self.by_key:
            raise RequestError(f"request {seq.key} runs already; every request needs its own id")
        if seq.constraint is not None:
            self.counters["constrained_requests"] += 1
        self.arrivals += 1
        seq.order = self.arrivals
        sampling = seq.request.sampling
        longest = self.caps.max_model_len
        seq.most_tokens = min(longest, seq.answer_from + sampling.max_tokens)
        ends = () if sampling.ignore_eos else self.caps.eos_token_ids
        seq.ends = frozenset((*sampling.stop_token_ids, *ends))
        self.by_key[seq.key] = seq
        self.order.enter(seq)

    def end(self, seq: LiveSequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        if reason == "abort":
            self.counters["aborts"] += 1
        self.leave(seq)
        self.ended.append(Progress(seq, seq.output_len, (), (), reason))

    def leave(self, seq: LiveSequence) -> None:
        """Out of every queue, memory given back."""
        match seq.phase:
            case Phase.WAITING:
                self.waiting.remove(seq)
            case Phase.ADMITTED | Phase.PREFILLING:
                self.prefilling.remove(seq)
            case Phase.RUNNING:
                self.running.remove(seq)
            case Phase.PARKED:
                self.parked.remove(seq)
                self.parking.drop(seq)
            case Phase.PREFILLED | Phase.FINISHED:
                pass
        self.order.leave(seq)
        self.twins.forget(seq)
        if seq.original is not None:
            seq.original.forks.remove(seq)
            seq.original = None
        if seq.blocks:
            self._give(seq)
        del self.by_key[seq.key]
        seq.to(Phase.FINISHED)
        for fork in seq.forks:  # what they waited for does not come: back into the queue
            self.prefilling.remove(fork)
            self._give(fork)
            fork.original = None
            fork.to(Phase.WAITING)
            self.waiting.append(fork)
        seq.forks.clear()

    # -- preemption -----------------------------------------------------------------------------

    def preempt(self, seq: LiveSequence) -> None:
        """Give a running sequence's memory to others: parked, computed again, or ended."""
        self.counters["preemptions"] += 1
        could_return = self.pools.blocks.fit(self.blocks_for(len(seq.tokens))) != "never"
        parked = could_return and self.parking.park(seq)
        if not parked and (self.role != "both" or not could_return):
            self.end(seq, "insufficient_system_resource")
            return
        self._put_aside(seq, parked=parked)

    def preempt_for(self, seq: LiveSequence) -> bool:
        """The same for a more urgent one, which nobody may end for: False where it would."""
        parked = self.parking.park(seq)
        if not parked and self.role != "both":
            return False
        self.counters["preemptions"] += 1
        self.counters["urgent_preemptions"] += 1
        self._put_aside(seq, parked=parked)
        return True

    def _put_aside(self, seq: LiveSequence, *, parked: bool) -> None:
        self.running.remove(seq)
        self._give(seq)
        if seq.constraint is not None:
            seq.constraint.forget()
        if parked:
            self.counters["parked"] += 1
            seq.to(Phase.PARKED)
            self.parked.append(seq)
        else:
            # Read again, output included, it goes on where it stood: each time a token further.
            self.counters["recomputed"] += 1
            seq.preemptions += 1
            seq.found = seq.cached
            seq.prompt_len = len(seq.tokens)
            seq.num_tokens = seq.planned = seq.published_blocks = 0
            seq.to(Phase.WAITING)
            self.waiting.append(seq)

    def resume(self, seq: LiveSequence, memory: tuple[list[int], int]) -> None:
        """A parked one goes on in this memory."""
        self.parked.remove(seq)
        seq.blocks, seq.state_slot = memory
        self.parking.resume(seq)
        seq.to(Phase.RUNNING)
        self.running.append(seq)

    def _give(self, seq: LiveSequence) -> None:
        self.pools.give(seq.blocks, seq.state_slot)
        seq.blocks, seq.state_slot = [], 0
