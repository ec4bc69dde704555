"""What runs next: pure policy over ids and counts. Time is an argument; nothing here computes.

Order of calls for one step, all under the loop's lock:
`admit` -> (prefix looked up) `ready` -> `plan` -> (runner) -> `absorb` -> (publish) -> `settle`.

A step may be planned while the one before it runs. Of a sequence that is in both, `ahead` and
`ahead_most` bound what the running step will commit: memory is reserved for the most, limits are
judged by the least, and what is decided by neither waits until the step is over.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer_engine.core.chunks import Reader
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.durations import Durations
from deepinfer_engine.core.fairness import FairOrder
from deepinfer_engine.core.plan import Chunk, Parking, Plan, Progress, Reservation, Role
from deepinfer_engine.core.pools import Pools
from deepinfer_engine.core.runner import Caps, StepOutput
from deepinfer_engine.core.sequence import LiveSequence, Phase
from deepinfer_engine.core.stop import cut_at_stop, draft_room
from deepinfer_engine.core.twins import Copies, Twins
from deepinfer_engine.core.types import FinishReason
from deepinfer_engine.core.windows import Prefix
from deepinfer_engine.errors import (
    CapacityError,
    ConfigError,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
)


@dataclass(slots=True)
class Scheduler:
    """Queues, phases and memory of one worker."""

    caps: Caps
    block_tokens: int
    config: EngineConfig
    role: Role
    parking: Parking
    keep_snapshots: bool
    """Ask the runner for the state at block boundaries (there is a prefix store to put them)."""
    stateless: bool = False
    """The model keeps no state: slots cannot run out, a prefix may end behind any block."""
    pools: Pools = field(init=False)
    counters: Counter[str] = field(init=False, default_factory=Counter[str])
    queued: Durations = field(init=False, default_factory=lambda: Durations("queue"))
    """From a prompt's arrival until it has memory."""
    _waiting: deque[LiveSequence] = field(init=False, default_factory=deque[LiveSequence])
    _prefilling: list[LiveSequence] = field(init=False, default_factory=list[LiveSequence])
    _running: list[LiveSequence] = field(init=False, default_factory=list[LiveSequence])
    _parked: deque[LiveSequence] = field(init=False, default_factory=deque[LiveSequence])
    _reservations: set[Reservation] = field(init=False, default_factory=set[Reservation])
    _by_key: dict[str, LiveSequence] = field(init=False, default_factory=dict[str, LiveSequence])
    _ended: list[Progress] = field(init=False, default_factory=list[Progress])
    _arrivals: int = field(init=False, default=0)
    _order: FairOrder = field(init=False)
    _twins: Twins = field(init=False, default_factory=Twins)
    _reader: Reader = field(init=False)
    _growth: int = field(init=False)
    """Blocks that a step takes for one sequence at most."""
    _decode_steps: int = field(init=False, default=0)
    _in_flight: int = field(init=False, default=0)
    """Steps that are planned and not yet settled."""

    def __post_init__(self) -> None:
        if self.config.max_num_batched_tokens < self.block_tokens:
            raise ConfigError(
                f"max_num_batched_tokens must hold one block of {self.block_tokens} tokens, got "
                f"{self.config.max_num_batched_tokens}"
            )
        self.pools = Pools.of(
            self.caps.num_blocks, self.caps.num_state_slots, stateless=self.stateless
        )
        self._order = FairOrder(self.config.age_s)
        self._growth = self._blocks_for(2 * (1 + self.caps.nextn)) + 1
        self._reader = Reader(
            self.caps,
            self.block_tokens,
            self.config,
            self.pools,
            self._order,
            keep_snapshots=self.keep_snapshots,
            alone=self.role == "prefill",
        )

    # -- requests come and go -------------------------------------------------------------------

    def add(self, seq: LiveSequence) -> None:
        """Queue a prompt. Raises like `check_fits`, and EngineUnavailable on a full queue."""
        self.check_fits(seq.prompt_len)
        wrong = next((t for t in (min(seq.tokens), max(seq.tokens)) if not self._is_token(t)), None)
        if wrong is not None:  # an id without an embedding would take the whole step down
            raise RequestError(f"token ids are 0 .. {self.caps.vocab_size - 1}, got {wrong}")
        if seq.request.pictures:
            if self.caps.pictures is None:
                raise RequestError("this model takes no pictures; send text alone")
            self.caps.pictures.check(seq.request.pictures, seq.tokens)
        if len(self._waiting) >= self.config.max_queue:
            raise EngineUnavailable(
                f"{len(self._waiting)} requests wait already; send this one again in a second"
            )
        self._enter(seq)
        self._waiting.append(seq)

    def check_fits(self, prompt_len: int) -> None:
        """RequestError (empty), PromptTooLong or CapacityError: it could never run here."""
        if prompt_len < 1:
            raise RequestError("the prompt is empty; send at least one token")
        if prompt_len >= self.caps.max_model_len:
            raise PromptTooLong(prompt_len, self.caps.max_model_len - 1)
        need = self._blocks_for(prompt_len + 1)
        if self.pools.blocks.fit(need) == "never":
            raise CapacityError(
                f"a prompt of {prompt_len} tokens needs {need} blocks, and this worker has "
                f"{self.pools.blocks.capacity}; shorten it, or start the worker with more blocks"
            )

    def reserve(self, prompt_len: int) -> Reservation | None:
        """Decode worker: memory for a prompt computed elsewhere, or None when not now."""
        self.check_fits(prompt_len)
        if self._parked or not self._has_place():
            return None
        need = self._blocks_for(prompt_len)
        if need + self._growth_reserve() > self.pools.blocks.free:
            return None
        taken = self.pools.take(need)
        if taken is None:
            return None
        reservation = Reservation(prompt_len, *taken)
        self._reservations.add(reservation)
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        self._reservations.remove(reservation)
        self.pools.give(reservation.blocks, reservation.state_slot)

    def start(self, seq: LiveSequence, reservation: Reservation) -> None:
        """Run a sequence whose prompt KV has arrived in the reserved memory.

        `seq.tokens` is the prompt and the first output token, which prefill has sampled and
        checked.
        """
        if len(seq.tokens) != reservation.prompt_len + 1:
            raise RuntimeError(
                f"{seq.key}: {len(seq.tokens)} tokens for {reservation.prompt_len} + 1"
            )
        self._enter(seq)
        self._reservations.remove(reservation)
        seq.blocks, seq.state_slot = reservation.blocks, reservation.state_slot
        seq.num_tokens = reservation.prompt_len
        seq.published_blocks = reservation.prompt_len // self.block_tokens
        seq.planned = reservation.prompt_len
        for phase in (Phase.ADMITTED, Phase.PREFILLING, Phase.RUNNING):
            seq.to(phase)
        self._running.append(seq)

    def release(self, key: str) -> None:
        """Prefill worker: the KV of this sequence has been handed over, or is not needed."""
        seq = self._by_key.get(key)
        if seq is not None and seq.phase is Phase.PREFILLED:
            self._leave(seq)

    def abort(self, key: str, reason: FinishReason = "abort") -> None:
        """End a sequence now, or when the step or load that uses its memory is over."""
        seq = self._by_key.get(key)
        if seq is None or seq.finish_reason is not None:
            return  # unknown, or it has ended and only its last step is not over
        if seq.in_use:
            seq.aborting = True
        else:
            self._end(seq, reason)

    def abort_all(self, reason: FinishReason) -> None:
        """The runner is gone: end everything, whatever was using its memory."""
        self._in_flight = 0
        for seq in list(self._by_key.values()):
            seq.users = 0
            if seq.finish_reason is None:
                self._end(seq, reason)
            else:
                self._leave(seq)

    # -- one step -------------------------------------------------------------------------------

    def admit(self, now: float) -> list[LiveSequence]:
        """Give waiting prompts their memory, in fair order with bounded overtaking.

        Returns those whose prefix is to be looked up; a fork of one that is being read waits for
        that one instead.
        """
        if not self._waiting or not self._has_place():
            return []
        admitted: list[LiveSequence] = []
        blocked: LiveSequence | None = None
        parked = min((self._order.level(seq, now) for seq in self._parked), default=None)
        ranked = [(self._order.rank(seq, now), seq.order, seq) for seq in self._waiting]
        heapq.heapify(ranked)
        while ranked and self._has_place():
            was, _, seq = heapq.heappop(ranked)
            rank = self._order.rank(seq, now)
            if rank != was:  # its user was served meanwhile
                heapq.heappush(ranked, (rank, seq.order, seq))
                continue
            if parked is not None and rank[0] >= parked:
                break  # those that were preempted come first in their class
            if blocked is not None and not self._may_overtake(blocked, now):
                break
            if self._take_in(seq):
                if not seq.preemptions:
                    seq.queued_s = now - seq.arrival
                    self.queued.observe(seq.queued_s)
                if seq.original is None:
                    admitted.append(seq)
                if blocked is not None:
                    blocked.overtaken += 1
            elif blocked is None:
                blocked = seq
                if seq.blocked_since is None:
                    seq.blocked_since = now
        return admitted

    def ready(self, seq: LiveSequence, prefix: Prefix) -> None:
        """The prefix lookup (and load) of an admitted sequence is over."""
        seq.users -= 1
        if seq.aborting:
            self._end(seq, "abort")
            return
        if seq.phase is Phase.FINISHED:
            return  # everything was ended while it loaded
        seq.prefix = prefix
        seq.num_tokens = seq.planned = prefix.start
        seq.published_blocks = prefix.n_tokens // self.block_tokens
        seq.to(Phase.PREFILLING)
        if not seq.preemptions:
            self.counters["cached_prompt_tokens"] += prefix.n_tokens
            self.counters["replayed_tokens"] += prefix.replayed

    def fork(self) -> Copies:
        """Let equal prompts go on from one that is read up to its last token; what to copy for it
        before the next `plan`."""
        blocks: list[tuple[int, int]] = []
        states: list[tuple[int, int]] = []
        for seq in self._prefilling:
            if not Twins.due(seq):
                continue
            full = seq.num_tokens // self.block_tokens
            for fork in seq.forks:
                tail = fork.blocks[0]
                self.pools.blocks.pin(seq.blocks[:full])
                fork.blocks = seq.blocks[:full] + fork.blocks
                if seq.num_tokens % self.block_tokens:
                    blocks.append((seq.blocks[full], tail))
                if fork.state_slot:
                    states.append((seq.state_slot, fork.state_slot))
                fork.original = None
                fork.prefix = Prefix(
                    seq.num_tokens, seq.num_tokens, generation=seq.prefix.generation
                )
                fork.num_tokens = fork.planned = seq.num_tokens
                fork.published_blocks = full
                fork.to(Phase.PREFILLING)
                self.counters["forked_prompts"] += 1
                self.counters["cached_prompt_tokens"] += fork.num_tokens
            seq.forks.clear()
        return Copies(tuple(blocks), tuple(states))

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to run, or nothing to decide while a step
        runs."""
        self._reader.tick(now)
        self._resume_parked(now)
        ready = [seq for seq in self._prefilling if self._reader.reads(seq)]
        mixed = self.config.max_gap > 0 and self.role == "both"
        if not mixed and ready and self._prefill_turn(ready[0], now):
            rows: list[tuple[LiveSequence, int]] = []
        else:
            planned = self._plan_rows(now)
            if planned is None:
                return None
            rows = planned
            ready = ready if mixed or not rows else []
        chunks = self._reader.chunks(ready, rows, now)
        if not rows and not chunks:
            return None
        self._decode_steps = self._decode_steps + 1 if not chunks else 0
        plan = Plan(chunks, tuple(rows))
        for chunk in chunks:
            chunk.seq.planned = chunk.end
            if chunk.sample:
                self._twins.forget(chunk.seq)
                chunk.seq.ahead += 1
                chunk.seq.ahead_most += 1
            chunk.seq.users += 1
        for seq, drafts in rows:
            seq.ahead += 1
            seq.ahead_most += drafts + 1
            seq.users += 1
        self._in_flight += 1
        return plan

    def absorb(self, plan: Plan, outputs: Sequence[StepOutput | None]) -> None:
        """Commit what the runner returned, of chunks and then of rows; memory stays as it is until
        `settle`. None is the output of a row that had ended when the step began."""
        n = len(plan.chunks)
        if len(outputs) != n + len(plan.rows):
            raise RuntimeError(f"{len(outputs)} outputs for {n + len(plan.rows)} sequences")
        if plan.chunks:
            self.counters["prefill_steps"] += 1
            self.counters["prefill_tokens"] += plan.prompt_tokens
        if plan.rows:
            self.counters["decode_steps"] += 1
            self.counters["mixed_steps"] += bool(plan.chunks)
        for chunk, output in zip(plan.chunks, outputs, strict=False):
            self._absorb_prefill(plan, chunk, output)
        drafted = accepted = 0
        for (seq, drafts), output in zip(plan.rows, outputs[n:], strict=True):
            seq.ahead -= 1
            seq.ahead_most -= drafts + 1
            if seq.finish_reason is not None or seq.aborting:
                continue
            if output is None:
                raise RuntimeError(f"the runner returned nothing for {seq.key}")
            self._absorb_decode(plan, seq, output)
            drafted += output.n_drafted
            accepted += output.n_accepted
        self.counters["drafted_tokens"] += drafted
        self.counters["accepted_tokens"] += accepted
        for salt, tokens in plan.generated.items():
            self.counters["generated_tokens"] += tokens
            self._order.charge(salt, tokens)

    def settle(self, plan: Plan) -> list[Progress]:
        """Let go of the step's memory, end what ended; returns the output in plan order."""
        self._in_flight -= 1
        self._reader.settled(plan)
        for chunk in plan.chunks:
            self.pools.states.give([slot for _, slot in chunk.snapshots])
        made = {one.seq.key: one for one in plan.progress}
        progress: list[Progress] = []
        for seq in plan.sequences:
            seq.users -= 1
            one = made.get(seq.key)
            if one is not None:
                progress.append(one)
            if seq.finish_reason is not None:
                if not seq.in_use and seq.phase is not Phase.FINISHED:
                    self._leave(seq)
            elif seq.aborting:
                if not seq.in_use:
                    self._end(seq, "abort")
            elif one is not None and seq.phase is Phase.PREFILLING:
                self._prefilling.remove(seq)
                if self.role == "prefill":
                    seq.to(Phase.PREFILLED)
                else:
                    seq.to(Phase.RUNNING)
                    self._running.append(seq)
        return progress + self.take_ended()

    def take_ended(self) -> list[Progress]:
        """Ends that no step reported: aborts, and sequences that could not be parked."""
        ended, self._ended = self._ended, []
        return ended

    def draft_room(self, seq: LiveSequence) -> int:
        """Drafts it may verify behind the least that steps ahead of it commit."""
        nextn, total = self.caps.nextn, len(seq.tokens) + seq.ahead
        if total < min(self.caps.max_model_len, seq.most_tokens) - nextn:
            return nextn
        return draft_room(
            nextn=self.caps.nextn,
            output_len=seq.output_len + seq.ahead,
            total_len=len(seq.tokens) + seq.ahead,
            sampling=seq.request.sampling,
            max_model_len=self.caps.max_model_len,
        )

    # -- what is seen from outside --------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        blocks, states = self.pools.blocks, self.pools.states
        phases = Counter(seq.phase for seq in self._by_key.values())
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "loading": phases[Phase.ADMITTED],
            "prefilling": phases[Phase.PREFILLING],
            "transferring": phases[Phase.PREFILLED] + len(self._reservations),
            "parked": len(self._parked),
            "blocks_free": blocks.free,
            "blocks_owned": blocks.owned,
            "blocks_capacity": blocks.capacity,
            "state_slots_free": states.free,
            "state_slots_capacity": states.capacity,
        }

    @property
    def unfinished(self) -> int:
        return len(self._by_key) + len(self._reservations)

    # -- inside ---------------------------------------------------------------------------------

    def _is_token(self, token: int) -> bool:
        return 0 <= token < self.caps.vocab_size

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _active(self) -> int:
        """Sequences that prefill, decode, or hold memory to do so."""
        return len(self._prefilling) + len(self._running) + len(self._reservations)

    def _has_place(self) -> bool:
        return self._active() < self.config.max_num_seqs

    def _may_overtake(self, blocked: LiveSequence, now: float) -> bool:
        since = now if blocked.blocked_since is None else blocked.blocked_since
        return blocked.overtaken < self.config.skip_ahead and now - since < self.config.hol_s

    def _growth_reserve(self) -> int:
        """Blocks to leave free for running sequences when one more is admitted."""
        active = self._active() + len(self._parked)
        if self.role == "prefill" or active == 0:
            return 0
        return self._blocks_for((active + 1) * self.config.decode_reserve_tokens)

    def _prefill_turn(self, oldest: LiveSequence, now: float) -> bool:
        if not self._running or self.role == "prefill":
            return True
        if self._decode_steps == 0:  # a long prompt must not starve the running ones
            return False
        urgent = now - oldest.arrival >= self.config.prefill_urgent_s
        return urgent or self._decode_steps >= self.config.prefill_every_steps

    def _take_in(self, seq: LiveSequence) -> bool:
        """Memory for a waiting prompt; False when there is none now."""
        original = self._twins.original(seq)
        shared = 0 if original is None else (seq.prompt_len - 1) // self.block_tokens
        need = self._blocks_for(seq.prompt_len) - shared
        if need + self._growth_reserve() > self.pools.blocks.free:
            return False
        taken = self.pools.take(need)
        if taken is None:
            return False
        seq.blocks, seq.state_slot = taken
        seq.to(Phase.ADMITTED)
        self._waiting.remove(seq)
        self._prefilling.append(seq)
        self._order.admitted(seq)
        self._order.charge(seq.salt, seq.prompt_len)
        if original is None:
            seq.users += 1
            self._twins.read(seq)
        else:
            seq.original = original
            original.forks.append(seq)
        return True

    def _plan_rows(self, now: float) -> list[tuple[LiveSequence, int]] | None:
        """Serve the best class and in it the shortest output first; where memory lacks, preempt the
        worst class and in it the longest output. None: memory lacks, and who could give it is in a
        step that runs."""
        able = [seq for seq in self._running if self._goes_on(seq)]
        if self.role == "both" and self._in_flight:
            able += [
                seq
                for seq in self._prefilling
                if seq.users and seq.planned >= seq.prompt_len and self._goes_on(seq)
            ]
        if len(able) * self._growth <= self.pools.blocks.free:
            rows = [(seq, self._grow(seq) or 0) for seq in able]  # enough for everybody
        else:
            served = self._served(able)
            if served is None:
                return None
            rows = served
        rows.sort(key=lambda row: (-len(row[0].tokens), row[0].order))
        return rows

    def _served(self, able: list[LiveSequence]) -> list[tuple[LiveSequence, int]] | None:
        order = deque(
            sorted(able, key=lambda s: (self._order.level(s, s.arrival), s.output_len, s.order))
        )
        rows: list[tuple[LiveSequence, int]] = []
        while order:
            seq = order.popleft()
            while (drafts := self._grow(seq)) is None:
                victim = order.pop() if order else seq
                if victim.in_use:
                    return None
                self._preempt(victim)
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
        sampling = seq.request.sampling
        least = len(seq.tokens) + seq.ahead
        return seq.output_len + seq.ahead < sampling.max_tokens and least < self.caps.max_model_len

    def _grow(self, seq: LiveSequence) -> int | None:
        """Blocks for anchor and drafts; rather fewer drafts than no step. None: no block left."""
        drafts = self.draft_room(seq)
        most = len(seq.tokens) + seq.ahead_most
        if most + drafts <= len(seq.blocks) * self.block_tokens:
            return drafts
        for n in range(self._blocks_for(most + drafts) - len(seq.blocks), 0, -1):
            taken = self.pools.blocks.take(n)
            if taken is not None:
                seq.blocks += taken
                break
        room = len(seq.blocks) * self.block_tokens - most
        return None if room < 0 else min(drafts, room)

    def _preempt(self, seq: LiveSequence) -> None:
        self.counters["preemptions"] += 1
        could_return = self.pools.blocks.fit(self._blocks_for(len(seq.tokens))) != "never"
        if not could_return:
            self._end(seq, "insufficient_system_resource")
            return
        parked = self.parking.park(seq)
        if not parked and self.role != "both":
            self._end(seq, "insufficient_system_resource")
            return
        self._running.remove(seq)
        self.pools.give(seq.blocks, seq.state_slot)
        seq.blocks, seq.state_slot = [], 0
        if seq.constraint is not None:
            seq.constraint.forget()
        if parked:
            self.counters["parked"] += 1
            seq.to(Phase.PARKED)
            self._parked.append(seq)
        else:
            # Read again, output included, it goes on where it stood: each time a token further.
            self.counters["recomputed"] += 1
            seq.preemptions += 1
            seq.found = seq.cached
            seq.prompt_len = len(seq.tokens)
            seq.num_tokens = seq.planned = seq.published_blocks = 0
            seq.to(Phase.WAITING)
            self._waiting.append(seq)

    def _resume_parked(self, now: float) -> None:
        while self._parked and self._has_place():
            seq = min(self._parked, key=lambda s: self._order.level(s, now))
            need = self._blocks_for(seq.num_tokens + 1)
            spare = self._growth_reserve() if self._running else 0
            if need + spare > self.pools.blocks.free:
                return
            taken = self.pools.take(need)
            if taken is None:
                return
            self._parked.remove(seq)
            seq.blocks, seq.state_slot = taken
            self.parking.resume(seq)
            seq.to(Phase.RUNNING)
            self._running.append(seq)

    def _absorb_prefill(self, plan: Plan, chunk: Chunk, output: StepOutput | None) -> None:
        seq = chunk.seq
        seq.num_tokens = chunk.end
        if chunk.sample:
            seq.ahead -= 1
            seq.ahead_most -= 1
        if output is not None:
            seq.prompt_logprobs += output.prompt_logprobs
            if not chunk.sample and seq.request.prompt_logprobs is not None:
                output = None
        if (output is not None) != chunk.sample:
            raise RuntimeError(f"{seq.key}: an output belongs to the last chunk of a prompt alone")
        if output is not None and not seq.aborting:
            if not seq.preemptions:
                self.counters["prompt_tokens"] += seq.prompt_len
            self._append(plan, seq, output)

    def _absorb_decode(self, plan: Plan, seq: LiveSequence, output: StepOutput) -> None:
        if seq.num_tokens != len(seq.tokens) - 1:
            raise RuntimeError(f"{seq.key}: {seq.num_tokens} resident of {len(seq.tokens)} tokens")
        seq.drafted_tokens += output.n_drafted
        seq.accepted_tokens += output.n_accepted
        self._append(plan, seq, output)
        seq.num_tokens = len(seq.tokens) - 1

    def _append(self, plan: Plan, seq: LiveSequence, output: StepOutput) -> None:
        total = len(seq.tokens)
        index, tokens = total - seq.answer_from, output.tokens
        end = total + len(tokens)
        if end >= min(self.caps.max_model_len, seq.most_tokens) or not seq.ends.isdisjoint(tokens):
            kept, seq.finish_reason = cut_at_stop(
                tokens,
                output_len=index,
                total_len=total,
                sampling=seq.request.sampling,
                eos_token_ids=self.caps.eos_token_ids,
                max_model_len=self.caps.max_model_len,
            )
            tokens = tokens[:kept]
        if output.failed and seq.finish_reason is None:
            seq.finish_reason = "error"
        seq.tokens.extend(tokens)
        plan.generated[seq.salt] += len(tokens)
        plan.progress.append(
            Progress(seq, index, tokens, output.logprobs[: len(tokens)], seq.finish_reason)
        )

    def _enter(self, seq: LiveSequence) -> None:
        if seq.key in self._by_key:
            raise RequestError(f"request {seq.key} runs already; every request needs its own id")
        if seq.constraint is not None:
            self.counters["constrained_requests"] += 1
        self._arrivals += 1
        seq.order = self._arrivals
        sampling = seq.request.sampling
        seq.most_tokens = seq.answer_from + sampling.max_tokens
        ends = () if sampling.ignore_eos else self.caps.eos_token_ids
        seq.ends = frozenset((*sampling.stop_token_ids, *ends))
        self._by_key[seq.key] = seq
        self._order.enter(seq)

    def _end(self, seq: LiveSequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        if reason == "abort":
            self.counters["aborts"] += 1
        self._leave(seq)
        self._ended.append(Progress(seq, seq.output_len, (), (), reason))

    def _leave(self, seq: LiveSequence) -> None:
        """Out of every queue, memory given back."""
        match seq.phase:
            case Phase.WAITING:
                self._waiting.remove(seq)
            case Phase.ADMITTED | Phase.PREFILLING:
                self._prefilling.remove(seq)
            case Phase.RUNNING:
                self._running.remove(seq)
            case Phase.PARKED:
                self._parked.remove(seq)
                self.parking.drop(seq)
            case Phase.PREFILLED | Phase.FINISHED:
                pass
        self._order.leave(seq)
        self._twins.forget(seq)
        if seq.original is not None:
            seq.original.forks.remove(seq)
            seq.original = None
        if seq.blocks:
            self.pools.give(seq.blocks, seq.state_slot)
            seq.blocks, seq.state_slot = [], 0
        del self._by_key[seq.key]
        seq.to(Phase.FINISHED)
        for fork in seq.forks:  # what they waited for does not come: back into the queue
            self._prefilling.remove(fork)
            self.pools.give(fork.blocks, fork.state_slot)
            fork.blocks, fork.state_slot, fork.original = [], 0, None
            fork.to(Phase.WAITING)
            self._waiting.append(fork)
        seq.forks.clear()
