"""What runs next: pure policy over ids and counts. Time is an argument; nothing here computes.

Order of calls for one step, all under the loop's lock:
`admit` -> (prefix looked up) `ready` -> `plan` -> (runner) -> `absorb` -> (publish) -> `settle`.

A step may be planned while the one before it runs. Of a sequence that is in both, `ahead` and
`ahead_most` bound what the running step will commit: memory is reserved for the most, limits are
judged by the least, and what is decided by neither waits until the step is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer_engine.core.admission import Admission
from deepinfer_engine.core.chunks import Reader
from deepinfer_engine.core.commit import absorb, account
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.decode_batch import DecodeBatch, Rows
from deepinfer_engine.core.durations import Durations
from deepinfer_engine.core.fairness import FairOrder
from deepinfer_engine.core.plan import Parking, Plan, Progress, Reservation, Role
from deepinfer_engine.core.pools import Pools
from deepinfer_engine.core.runner import Caps, StepOutput
from deepinfer_engine.core.sequence import LiveSequence, Phase
from deepinfer_engine.core.sequences import Sequences
from deepinfer_engine.core.targets import FirstTokenTarget, TokenTarget
from deepinfer_engine.core.twins import Copies, Twins
from deepinfer_engine.core.types import FinishReason
from deepinfer_engine.core.votes import StepKind, Wish
from deepinfer_engine.core.windows import Prefix
from deepinfer_engine.errors import (
    CapacityError,
    ConfigError,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
)

WATERMARK = 0.9
"""A worker whose blocks are fuller than that does not ask for new prompts in a vote."""


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
    at: Sequences = field(init=False)
    pools: Pools = field(init=False)
    counters: Counter[str] = field(init=False)
    _admission: Admission = field(init=False)
    _reader: Reader = field(init=False)
    batch: DecodeBatch = field(init=False)
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
        order = FairOrder(self.config.age_s)
        tokens = TokenTarget(self.config.token_target_s, self.caps.nextn)
        first = FirstTokenTarget(self.config.ttft_target_s)
        self.at = Sequences(
            self.caps,
            self.block_tokens,
            self.config,
            self.role,
            self.parking,
            self.pools,
            order,
            tokens,
            first,
        )
        self.counters = self.at.counters
        self._admission = Admission(self.at)
        self.batch = DecodeBatch(self.at)
        self._reader = Reader(
            self.caps,
            self.block_tokens,
            self.config,
            self.pools,
            order,
            tokens,
            first,
            keep_snapshots=self.keep_snapshots,
            alone=self.role == "prefill",
        )

    @property
    def queued(self) -> Durations:
        """From a prompt's arrival until it has memory."""
        return self._admission.queued

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
        if len(self.at.waiting) >= self.config.max_queue:
            raise EngineUnavailable(
                f"{len(self.at.waiting)} requests wait already; send this one again in a second"
            )
        self.at.enter(seq)
        self.at.waiting.append(seq)

    def check_fits(self, prompt_len: int) -> None:
        """RequestError (empty), PromptTooLong or CapacityError: it could never run here."""
        if prompt_len < 1:
            raise RequestError("the prompt is empty; send at least one token")
        if prompt_len >= self.caps.max_model_len:
            raise PromptTooLong(prompt_len, self.caps.max_model_len - 1)
        need = self.at.blocks_for(prompt_len + 1)
        if self.pools.blocks.fit(need) == "never":
            raise CapacityError(
                f"a prompt of {prompt_len} tokens needs {need} blocks, and this worker has "
                f"{self.pools.blocks.capacity}; shorten it, or start the worker with more blocks"
            )

    def reserve(self, prompt_len: int, priority: int = 0) -> Reservation | None:
        """Decode worker: memory for a prompt computed elsewhere, or None when not now.

        What runs in a worse class makes room before the next step: ask again then."""
        self.check_fits(prompt_len)
        return self._admission.reserve(prompt_len, priority)

    def cancel(self, reservation: Reservation) -> None:
        self.at.reservations.remove(reservation)
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
        self.at.enter(seq)
        self.at.reservations.remove(reservation)
        seq.blocks, seq.state_slot = reservation.blocks, reservation.state_slot
        seq.num_tokens = reservation.prompt_len
        seq.published_blocks = reservation.prompt_len // self.block_tokens
        seq.planned = reservation.prompt_len
        for phase in (Phase.ADMITTED, Phase.PREFILLING, Phase.RUNNING):
            seq.to(phase)
        self.at.running.append(seq)

    def release(self, key: str) -> None:
        """Prefill worker: the KV of this sequence has been handed over, or is not needed."""
        seq = self.at.by_key.get(key)
        if seq is not None and seq.phase is Phase.PREFILLED:
            self.at.leave(seq)

    def abort(self, key: str, reason: FinishReason = "abort") -> None:
        """End a sequence now, or when the step or load that uses its memory is over."""
        seq = self.at.by_key.get(key)
        if seq is None or seq.finish_reason is not None:
            return  # unknown, or it has ended and only its last step is not over
        if seq.in_use:
            seq.aborting = True
            self.at.ends += 1
        else:
            self.at.end(seq, reason)

    def abort_all(self, reason: FinishReason) -> None:
        """The runner is gone: end everything, whatever was using its memory."""
        self.at.in_flight = 0
        for seq in list(self.at.by_key.values()):
            seq.users = 0
            if seq.finish_reason is None:
                self.at.end(seq, reason)
            else:
                self.at.leave(seq)

    # -- one step -------------------------------------------------------------------------------

    def admit(self, now: float) -> list[LiveSequence]:
        """Give waiting prompts their memory, in fair order with bounded overtaking; who runs in a
        worse class makes room.

        Returns those whose prefix is to be looked up; a fork of one that is being read waits for
        that one instead.
        """
        return self._admission.admit(now)

    def ready(self, seq: LiveSequence, prefix: Prefix) -> None:
        """The prefix lookup (and load) of an admitted sequence is over."""
        seq.users -= 1
        if seq.aborting:
            self.at.end(seq, "abort")
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
        for seq in self.at.prefilling:
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

    def wish(self, now: float) -> Wish:
        """What this worker would do next, were it asked."""
        at = self.at
        ready = [seq for seq in at.prefilling if self._reader.reads(seq)]
        full = self.pools.blocks.free < (1 - WATERMARK) * self.pools.blocks.capacity
        waits = ready or ([] if full else at.waiting)
        oldest = min((seq.arrival for seq in waits), default=now)
        urgent = bool(waits) and now - oldest >= self.config.prefill_urgent_s
        return Wish(bool(waits), bool(at.running or at.parked), urgent)

    def plan(self, now: float, kind: StepKind | None = None) -> Plan | None:
        """The next step, or None when there is nothing to run, or nothing to decide while a step
        runs. kind: all that it may hold."""
        self._reader.tick(now)
        if not self._admission.before_step(now):
            return None
        ready = [seq for seq in self.at.prefilling if self._reader.reads(seq)]
        paced = self.config.max_gap > 0 or self.config.token_target_s > 0
        mixed = paced and self.role == "both" and kind is None
        if kind == "prefill":
            reads = True
        elif kind == "decode":
            ready, reads = [], False
        else:
            reads = not mixed and bool(ready) and self._prefill_turn(ready[0], now)
        if reads:
            rows: Rows = []
        else:
            planned = self.batch.rows()
            if planned is None:
                return None
            rows = planned
            ready = ready if mixed or not rows else []
        chunks = self._reader.chunks(ready, rows, now)
        if not rows and not chunks:
            return None
        self._decode_steps = self._decode_steps + 1 if not chunks else 0
        stops = set[int]()
        plan = Plan(chunks, tuple(rows), self.at.ends, roomy=True, stops=stops)
        for chunk in chunks:
            chunk.seq.planned = chunk.end
            if chunk.sample:
                self.at.twins.forget(chunk.seq)
                chunk.seq.ahead += 1
                chunk.seq.ahead_most += 1
            chunk.seq.users += 1
        for seq, drafts in rows:
            seq.ahead += 1
            seq.ahead_most += drafts + 1
            seq.users += 1
            stops.update(seq.ends)
            if len(seq.tokens) + seq.ahead_most >= seq.most_tokens:
                plan.roomy = False
        self.at.in_flight += 1
        return plan

    def absorb(self, plan: Plan, outputs: Sequence[StepOutput | None]) -> None:
        """Commit what the runner returned, of chunks and then of rows; memory stays as it is until
        `settle`. None is the output of a row that had ended when the step began."""
        absorb(self.at, plan, outputs)

    def settle(self, plan: Plan) -> list[Progress]:
        """Count what the step made, let go of its memory, end what ended; returns the output in
        plan order."""
        self.at.in_flight -= 1
        self._reader.settled(plan)
        for chunk in plan.chunks:
            self.pools.states.give([slot for _, slot in chunk.snapshots])
        progress = account(self.at, plan)
        spoke = {one.seq for one in progress}
        for seq in plan.sequences:
            seq.users -= 1
            if seq.finish_reason is not None:
                if not seq.in_use and seq.phase is not Phase.FINISHED:
                    self.at.leave(seq)
            elif seq.aborting:
                if not seq.in_use:
                    self.at.end(seq, "abort")
            elif seq.phase is Phase.PREFILLING and seq in spoke:
                self.at.prefilling.remove(seq)
                if self.role == "prefill":
                    seq.to(Phase.PREFILLED)
                else:
                    seq.to(Phase.RUNNING)
                    self.at.running.append(seq)
        return progress + self.take_ended()

    def take_ended(self) -> list[Progress]:
        """Ends that no step reported: aborts, and sequences that could not be parked."""
        ended, self.at.ended = self.at.ended, []
        return ended

    # -- what is seen from outside --------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        blocks, states = self.pools.blocks, self.pools.states
        phases = Counter(seq.phase for seq in self.at.by_key.values())
        return self._times() | {
            "running": len(self.at.running),
            "waiting": len(self.at.waiting),
            "loading": phases[Phase.ADMITTED],
            "prefilling": phases[Phase.PREFILLING],
            "transferring": phases[Phase.PREFILLED] + len(self.at.reservations),
            "parked": len(self.at.parked),
            "blocks_free": blocks.free,
            "blocks_owned": blocks.owned,
            "blocks_capacity": blocks.capacity,
            "state_slots_free": states.free,
            "state_slots_capacity": states.capacity,
        }

    @property
    def unfinished(self) -> int:
        return len(self.at.by_key) + len(self.at.reservations)

    # -- inside ---------------------------------------------------------------------------------

    def _times(self) -> dict[str, float]:
        """Where a target is set: what a token takes, and how many more sequences leave it so."""
        at = self.at
        if not at.tokens.target or self.role == "prefill":
            return {}
        rows, context = at.active(), at.context()
        most = max(0, self.config.max_num_seqs - rows)
        return {
            "token_seconds": at.tokens.token_seconds(rows, context) or 0.0,
            "token_room": at.tokens.room(rows, context, most),
        }

    def _is_token(self, token: int) -> bool:
        return 0 <= token < self.caps.vocab_size

    def _prefill_turn(self, oldest: LiveSequence, now: float) -> bool:
        if not self.at.running or self.role == "prefill":
            return True
        if self._decode_steps == 0:  # a long prompt must not starve the running ones
            return False
        urgent = now - oldest.arrival >= self.config.prefill_urgent_s
        return urgent or self._decode_steps >= self.config.prefill_every_steps
