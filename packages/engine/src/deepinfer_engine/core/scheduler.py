"""What runs next: pure policy over ids and counts. Time is an argument; nothing here computes.

Order of calls for one step, all under the loop's lock:
`admit` -> (prefix looked up) `ready` -> `plan` -> (runner) -> `absorb` -> (publish) -> `settle`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.plan import (
    Chunk,
    DecodePlan,
    Parking,
    Plan,
    PrefillPlan,
    Progress,
    Reservation,
    Role,
)
from deepinfer_engine.core.pools import Pools
from deepinfer_engine.core.runner import Caps, StepOutput
from deepinfer_engine.core.sequence import LiveSequence, Phase
from deepinfer_engine.core.stop import cut_at_stop, draft_room
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
    _waiting: deque[LiveSequence] = field(init=False, default_factory=deque[LiveSequence])
    _prefilling: list[LiveSequence] = field(init=False, default_factory=list[LiveSequence])
    _running: list[LiveSequence] = field(init=False, default_factory=list[LiveSequence])
    _parked: deque[LiveSequence] = field(init=False, default_factory=deque[LiveSequence])
    _reservations: set[Reservation] = field(init=False, default_factory=set[Reservation])
    _by_key: dict[str, LiveSequence] = field(init=False, default_factory=dict[str, LiveSequence])
    _ended: list[Progress] = field(init=False, default_factory=list[Progress])
    _arrivals: int = field(init=False, default=0)
    _decode_steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.config.max_num_batched_tokens < self.block_tokens:
            raise ConfigError(
                f"max_num_batched_tokens must hold one block of {self.block_tokens} tokens, got "
                f"{self.config.max_num_batched_tokens}"
            )
        self.pools = Pools.of(
            self.caps.num_blocks, self.caps.num_state_slots, stateless=self.stateless
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
        if seq is None:
            return
        if seq.in_use:
            seq.aborting = True
        else:
            self._end(seq, reason)

    def abort_all(self, reason: FinishReason) -> None:
        """The runner is gone: end everything, whatever was using its memory."""
        for seq in list(self._by_key.values()):
            seq.in_use = False
            self._end(seq, reason)

    # -- one step -------------------------------------------------------------------------------

    def admit(self, now: float) -> list[LiveSequence]:
        """Give waiting prompts their memory, first come first served with bounded overtaking."""
        admitted: list[LiveSequence] = []
        blocked: LiveSequence | None = None
        for seq in list(self._waiting):
            if self._parked or not self._has_place():
                break
            if blocked is not None and not self._may_overtake(blocked, now):
                break
            need = self._blocks_for(seq.prompt_len)
            taken = None
            if need + self._growth_reserve() <= self.pools.blocks.free:
                taken = self.pools.take(need)
            if taken is not None:
                seq.blocks, seq.state_slot = taken
                seq.in_use = True
                seq.to(Phase.ADMITTED)
                self._waiting.remove(seq)
                self._prefilling.append(seq)
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
        seq.in_use = False
        if seq.aborting:
            self._end(seq, "abort")
            return
        seq.prefix = prefix
        seq.num_tokens = prefix.start
        seq.published_blocks = prefix.n_tokens // self.block_tokens
        seq.to(Phase.PREFILLING)
        self.counters["cached_prompt_tokens"] += prefix.n_tokens
        self.counters["replayed_tokens"] += prefix.replayed

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to run."""
        self._resume_parked()
        ready = [seq for seq in self._prefilling if seq.phase is Phase.PREFILLING]
        if ready and self._prefill_turn(ready[0], now):
            return self._plan_prefill(ready)
        return self._plan_decode()

    def absorb(self, plan: Plan, outputs: Sequence[StepOutput | None]) -> None:
        """Commit what the runner returned; memory stays as it is until `settle`."""
        if isinstance(plan, PrefillPlan):
            self.counters["prefill_steps"] += 1
            for chunk, output in zip(plan.chunks, outputs, strict=True):
                self.counters["prefill_tokens"] += chunk.end - chunk.start
                self._absorb_prefill(chunk, output)
        else:
            self.counters["decode_steps"] += 1
            for (seq, _), output in zip(plan.rows, outputs, strict=True):
                if output is None:
                    raise RuntimeError(f"the runner returned nothing for {seq.key}")
                self._absorb_decode(seq, output)

    def settle(self, plan: Plan) -> list[Progress]:
        """Let go of the step's memory, end what ended; returns the output in plan order."""
        progress: list[Progress] = []
        if isinstance(plan, PrefillPlan):
            for chunk in plan.chunks:
                self.pools.states.give([slot for _, slot in chunk.snapshots])
            seqs = [chunk.seq for chunk in plan.chunks]
        else:
            seqs = [seq for seq, _ in plan.rows]
        for seq in seqs:
            seq.in_use = False
            if seq.aborting:
                self._end(seq, "abort")
                continue
            if not seq.fresh and seq.finish_reason is None:
                continue
            tokens, logprobs, seq.fresh = seq.fresh, seq.fresh_logprobs, ()
            index = seq.output_len - len(tokens)
            progress.append(Progress(seq, index, tokens, logprobs, seq.finish_reason))
            if seq.finish_reason is not None:
                self._leave(seq)
            elif seq.phase is Phase.PREFILLING:
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
        return (
            len(self._prefilling) + len(self._running) + len(self._parked) + len(self._reservations)
        )

    def _has_place(self) -> bool:
        return self._active() < self.config.max_num_seqs

    def _may_overtake(self, blocked: LiveSequence, now: float) -> bool:
        since = now if blocked.blocked_since is None else blocked.blocked_since
        return blocked.overtaken < self.config.skip_ahead and now - since < self.config.hol_s

    def _growth_reserve(self) -> int:
        """Blocks to leave free for running sequences when one more is admitted."""
        active = self._active()
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

    def _plan_prefill(self, ready: list[LiveSequence]) -> PrefillPlan:
        """Chunks in order of arrival until the token budget is used; cuts fall on block borders."""
        self._decode_steps = 0
        budget = self.config.max_num_batched_tokens
        cuts: list[tuple[LiveSequence, int]] = []
        for seq in ready:
            end = seq.prompt_len
            if end - seq.num_tokens > budget:
                end = (seq.num_tokens + budget) // self.block_tokens * self.block_tokens
            if end <= seq.num_tokens:
                break
            budget -= end - seq.num_tokens
            cuts.append((seq, end))
        return PrefillPlan(tuple(self._chunk(seq, end) for seq, end in cuts))

    def _chunk(self, seq: LiveSequence, end: int) -> Chunk:
        first = seq.num_tokens // self.block_tokens + 1
        borders = [b * self.block_tokens for b in range(first, end // self.block_tokens + 1)]
        whole = self.caps.snapshot_from(seq.prompt_len)
        if seq.prefix.replayed:
            # Within a replay only its end is whole.
            whole = max(whole, seq.prefix.n_tokens)
        recent = seq.prompt_len - self.config.prompt_windows * self.block_tokens
        wanted = {*seq.wanted_borders, seq.prefix.n_tokens}
        borders = [p for p in borders if p >= whole and (p > recent or p in wanted)]
        # Spare slots are few: the borders nearest the end of the prompt serve the next turn best.
        n = min(len(borders), self.pools.states.free) if self.keep_snapshots else 0
        slots = self.pools.states.take(n) or []
        seq.in_use = True
        borders.sort(key=lambda position: (position in seq.wanted_borders, position))
        snapshots = tuple(zip(sorted(borders[len(borders) - n :]), slots, strict=True))
        return Chunk(seq, seq.num_tokens, end, snapshots)

    def _plan_decode(self) -> DecodePlan | None:
        """Serve the shortest output first; where memory lacks, preempt the longest output."""
        order = deque(sorted(self._running, key=lambda seq: (seq.output_len, seq.order)))
        rows: list[tuple[LiveSequence, int]] = []
        while order:
            seq = order.popleft()
            while (drafts := self._grow(seq)) is None:
                victim = order.pop() if order else seq
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                rows.append((seq, drafts))
        if not rows:
            return None
        self._decode_steps += 1
        for seq, _ in rows:
            seq.in_use = True
        rows.sort(key=lambda row: (-len(row[0].tokens), row[0].order))
        return DecodePlan(tuple(rows))

    def _grow(self, seq: LiveSequence) -> int | None:
        """Blocks for anchor and drafts; rather fewer drafts than no step. None: no block left."""
        drafts = draft_room(
            nextn=self.caps.nextn,
            output_len=seq.output_len,
            total_len=len(seq.tokens),
            sampling=seq.request.sampling,
            max_model_len=self.caps.max_model_len,
        )
        for n in range(self._blocks_for(seq.num_tokens + 1 + drafts) - len(seq.blocks), 0, -1):
            taken = self.pools.blocks.take(n)
            if taken is not None:
                seq.blocks += taken
                break
        room = len(seq.blocks) * self.block_tokens - (seq.num_tokens + 1)
        return None if room < 0 else min(drafts, room)

    def _preempt(self, seq: LiveSequence) -> None:
        self.counters["preemptions"] += 1
        could_return = self.pools.blocks.fit(self._blocks_for(seq.num_tokens + 1)) != "never"
        if could_return and self.parking.park(seq):
            self.counters["parked"] += 1
            self._running.remove(seq)
            self.pools.give(seq.blocks, seq.state_slot)
            seq.blocks, seq.state_slot = [], 0
            if seq.constraint is not None:
                seq.constraint.forget()
            seq.to(Phase.PARKED)
            self._parked.append(seq)
        else:
            self._end(seq, "insufficient_system_resource")

    def _resume_parked(self) -> None:
        while self._parked:
            seq = self._parked[0]
            need = self._blocks_for(seq.num_tokens + 1)
            spare = self._growth_reserve() if self._running else 0
            if need + spare > self.pools.blocks.free:
                return
            taken = self.pools.take(need)
            if taken is None:
                return
            self._parked.popleft()
            seq.blocks, seq.state_slot = taken
            self.parking.resume(seq)
            seq.to(Phase.RUNNING)
            self._running.append(seq)

    def _absorb_prefill(self, chunk: Chunk, output: StepOutput | None) -> None:
        seq = chunk.seq
        seq.num_tokens = chunk.end
        if output is not None:
            seq.prompt_logprobs += output.prompt_logprobs
            if not chunk.sample and chunk.seq.request.prompt_logprobs is not None:
                output = None
        if (output is not None) != chunk.sample:
            raise RuntimeError(f"{seq.key}: an output belongs to the last chunk of a prompt alone")
        if output is not None and not seq.aborting:
            self.counters["prompt_tokens"] += seq.prompt_len
            self._append(seq, output)

    def _absorb_decode(self, seq: LiveSequence, output: StepOutput) -> None:
        if seq.num_tokens != len(seq.tokens) - 1:
            raise RuntimeError(f"{seq.key}: {seq.num_tokens} resident of {len(seq.tokens)} tokens")
        if seq.aborting:
            return
        seq.drafted_tokens += output.n_drafted
        seq.accepted_tokens += output.n_accepted
        self.counters["drafted_tokens"] += output.n_drafted
        self.counters["accepted_tokens"] += output.n_accepted
        self._append(seq, output)
        seq.num_tokens = len(seq.tokens) - 1

    def _append(self, seq: LiveSequence, output: StepOutput) -> None:
        kept, seq.finish_reason = cut_at_stop(
            output.tokens,
            output_len=seq.output_len,
            total_len=len(seq.tokens),
            sampling=seq.request.sampling,
            eos_token_ids=self.caps.eos_token_ids,
            max_model_len=self.caps.max_model_len,
        )
        if output.failed and seq.finish_reason is None:
            seq.finish_reason = "error"
        seq.fresh = tuple(output.tokens[:kept])
        seq.fresh_logprobs = tuple(output.logprobs[:kept])
        seq.tokens.extend(seq.fresh)
        self.counters["generated_tokens"] += kept

    def _enter(self, seq: LiveSequence) -> None:
        if seq.key in self._by_key:
            raise RequestError(f"request {seq.key} runs already; every request needs its own id")
        if seq.constraint is not None:
            self.counters["constrained_requests"] += 1
        self._arrivals += 1
        seq.order = self._arrivals
        self._by_key[seq.key] = seq

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
        if seq.blocks:
            self.pools.give(seq.blocks, seq.state_slot)
            seq.blocks, seq.state_slot = [], 0
        del self._by_key[seq.key]
        seq.to(Phase.FINISHED)
