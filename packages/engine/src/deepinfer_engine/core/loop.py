"""The hot loop: schedule, run, commit, publish.

`EngineLoop.step` belongs to one thread; every other method may be called from any thread. The
lock is held while queues and pools change and never while the model computes, so that a
reservation or an abort is answered during a step. No clock is read here: the caller says what
time it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.constraint import SequenceConstraint
from deepinfer_engine.core.pictures import overlapping, text_only
from deepinfer_engine.core.plan import Chunk, Parking, Plan, Progress, Reservation, Role
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk, StepOutput, StepRunner
from deepinfer_engine.core.scheduler import Scheduler
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.sharing import PrefixSharing
from deepinfer_engine.core.twins import Copies
from deepinfer_engine.core.types import FinishReason, GenerateRequest
from deepinfer_engine.core.votes import StepKind
from deepinfer_engine.core.windows import NOTHING, Prefix


class PrefixLink(Protocol):
    """The loop's side of the prefix store."""

    def look_up(self, seq: LiveSequence, loaded: LoadedCallback) -> bool:
        """Look for a cached prefix. True: this has started, and `loaded(seq, prefix)` will be
        called from another thread when the prefix is in the sequence's memory."""
        ...

    def publish(
        self,
        seq: LiveSequence,
        blocks: Sequence[tuple[int, int]],
        states: Sequence[tuple[int, int]],
    ) -> None:
        """Offer (block index, block id) and (position, state slot); copies before it returns.

        Both are empty where the sequence ends without having passed a border."""
        ...

    def after_publications(self, call: Callable[[], None]) -> None:
        """Call `call`, on another thread, once everything published before is findable."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """What another process of this engine said last of what it does."""

    pid: int
    counters: Mapping[str, float]
    gauges: Mapping[str, float]


class LoadedCallback(Protocol):
    def __call__(self, seq: LiveSequence, prefix: Prefix) -> None: ...


class Gather(Protocol):
    def __call__(self, seq: LiveSequence, prefix: Prefix, there: Callable[[], None]) -> bool:
        """Get what a prompt is read with beside its tokens and this cached prefix: embeddings of
        pictures. True: this has started, and `there()` will be called once from any thread when it
        is over, well or not."""
        ...


class Sink(Protocol):
    """Where output goes. Called without the lock, from the step's or the aborting thread."""

    def chunk_done(self, chunk: Chunk) -> None:
        """Prefill worker: KV of the chunk is complete; its sequence still owns its memory."""
        ...

    def progress(self, progress: Progress) -> None: ...


class EngineLoop:
    """One runner, its scheduler, and the thread-safe door to both."""

    def __init__(
        self,
        runner: StepRunner,
        config: EngineConfig,
        role: Role,
        *,
        parking: Parking,
        link: PrefixLink | None,
        sink: Sink,
    ) -> None:
        self._runner = runner
        self._link = link
        self._sink = sink
        self._changed = threading.Condition()
        self._sharing = PrefixSharing(runner.layout.block_tokens)
        self._work = True
        self.gather: Gather | None = None
        """Set before the first step; None: prompts are read with their tokens alone."""
        self.scheduler = Scheduler(
            caps=runner.caps,
            block_tokens=runner.layout.block_tokens,
            config=config,
            role=role,
            parking=parking,
            keep_snapshots=link is not None and runner.layout.state_bytes > 0,
            stateless=runner.layout.state_bytes == 0,
        )

    # -- the step thread ------------------------------------------------------------------------

    def step(self, now: float) -> Plan | None:
        """One step; returns what ran, or None when there was nothing to run."""
        plan = self._plan(now)
        if plan is None:
            return None
        self._run(plan)
        return plan

    def _run(self, plan: Plan) -> None:
        outputs = self._launch(*self._prepared(plan), self._walks(plan))
        self._commit(plan, outputs)
        self._settle(plan)

    def _plan(self, now: float) -> Plan | None:
        self._admit(now)
        return self._chosen(now)

    def _admit(self, now: float) -> None:
        """Memory for those that wait, and what is cached of their prompts."""
        with self._changed:
            admitted = self.scheduler.admit(now)
            if self._link is not None:
                admitted = self._sharing.hold(admitted)
            freed = self._sharing.due()
        for seq in admitted:
            self._look_up(seq)
        for seq in freed:
            self._after_publications(seq)

    def _chosen(self, now: float, kind: StepKind | None = None) -> Plan | None:
        with self._changed:
            self._copy(self.scheduler.fork())
            plan = self.scheduler.plan(now, kind)
            ended = self.scheduler.take_ended()
        self._emit(ended)
        return plan

    def _copy(self, copies: Copies) -> None:
        runner = self._runner
        for source, target in copies.blocks:
            runner.block_bytes(target)[:] = runner.block_bytes(source)
        for source, target in copies.states:
            runner.state_bytes(target)[:] = runner.state_bytes(source)

    def _commit(self, plan: Plan, outputs: Sequence[StepOutput | None]) -> None:
        with self._changed:
            self.scheduler.absorb(plan, outputs)
        # The sequences are still `in_use`: nobody frees their memory while it is copied.
        self._publish(plan)

    def _settle(self, plan: Plan) -> None:
        with self._changed:
            progress = self.scheduler.settle(plan)
        self._emit(progress)

    def _look_up(self, seq: LiveSequence) -> None:
        # A cached token has no logits.
        whole = seq.request.prompt_logprobs is not None and not seq.preemptions
        if self._link is None or whole or not self._link.look_up(seq, self.loaded):
            self.loaded(seq, NOTHING)

    def _after_publications(self, seq: LiveSequence) -> None:
        """Look up once what others computed is findable."""
        if self._link is None:
            self._look_up(seq)
        else:
            self._link.after_publications(lambda: self._look_up(seq))

    def close(self) -> None:
        """Nothing runs afterwards. The last call of the step thread."""

    def wait_for_work(self) -> None:
        """Block until something happened that may let `step` run something."""
        with self._changed:
            self._changed.wait_for(lambda: self._work)
            self._work = False

    def wake(self) -> None:
        with self._changed:
            self._notify()

    @property
    def waits_for(self) -> Sequence[threading.Thread]:
        """Threads that a step waits for: while they work, it does."""
        return ()

    # -- any thread -----------------------------------------------------------------------------

    def submit(
        self,
        request: GenerateRequest,
        key: str,
        now: float,
        constraint: SequenceConstraint | None = None,
    ) -> None:
        """Queue a prompt; raises RequestError kinds and EngineUnavailable."""
        with self._changed:
            self.scheduler.add(LiveSequence(request, key, now, constraint))
            self._notify()

    def loaded(self, seq: LiveSequence, prefix: Prefix) -> None:
        """What the cache has of an admitted sequence's prompt is in place."""
        if self.gather is None or not self.gather(seq, prefix, lambda: self._gathered(seq, prefix)):
            self._gathered(seq, prefix)

    def _gathered(self, seq: LiveSequence, prefix: Prefix) -> None:
        if prefix.start == 0 or prefix.replayed:
            self._runner.clear_state(seq.state_slot)
        with self._changed:
            self.scheduler.ready(seq, prefix)
            self._notify()
            ended = self.scheduler.take_ended()
        self._emit(ended)

    def reserve(self, prompt_len: int, priority: int = 0) -> Reservation | None:
        with self._changed:
            reservation = self.scheduler.reserve(prompt_len, priority)
            if reservation is None:
                self._notify()  # the next step may begin with making room
            return reservation

    def pin(self, blocks: Sequence[int], state_slot: int) -> None:
        """Add an owner, the writer of a transfer, to memory that has one."""
        with self._changed:
            self.scheduler.pools.pin(blocks, state_slot)

    def unpin(self, blocks: Sequence[int], state_slot: int) -> None:
        with self._changed:
            self.scheduler.pools.give(blocks, state_slot)
            self._notify()

    def cancel(self, reservation: Reservation) -> None:
        with self._changed:
            self.scheduler.cancel(reservation)
            self._notify()

    def start(self, seq: LiveSequence, reservation: Reservation) -> None:
        with self._changed:
            self.scheduler.start(seq, reservation)
            self._notify()

    def release(self, key: str) -> None:
        with self._changed:
            self.scheduler.release(key)
            self._notify()

    def abort(self, key: str) -> None:
        """End a sequence; its Progress with `finish="abort"` comes when its memory is free."""
        with self._changed:
            self.scheduler.abort(key)
            self._notify()
            ended = self.scheduler.take_ended()
        self._emit(ended)

    def abort_all(self, reason: FinishReason) -> None:
        """Only when no step will run any more."""
        with self._changed:
            self.scheduler.abort_all(reason)
            ended = self.scheduler.take_ended()
        self._emit(ended)

    def audit(self) -> None:
        """Raise PoolError when a block or slot is lost or owned wrongly."""
        with self._changed:
            self.scheduler.pools.audit()

    @property
    def unfinished(self) -> int:
        with self._changed:
            return self.scheduler.unfinished

    def snapshot(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges now."""
        with self._changed:
            counters = {**self.scheduler.counters, **self.scheduler.queued.counters()}
            return counters, self.scheduler.gauges()

    @property
    def others(self) -> Sequence[Report]:
        """Processes that run requests of this engine beside this one."""
        return ()

    # -- inside ---------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._work = True
        self._changed.notify_all()

    def _emit(self, progress: Iterable[Progress]) -> None:
        for one in progress:
            self._sink.progress(one)

    def _prepared(self, plan: Plan) -> tuple[list[PrefillChunk], list[DecodeRow]]:
        """What the runner is given; grammars are not there yet."""
        return (
            [self._prefill_chunk(chunk) for chunk in plan.chunks],
            [self._decode_row(seq, drafts) for seq, drafts in plan.rows],
        )

    def _launch(
        self,
        chunks: Sequence[PrefillChunk],
        rows: Sequence[DecodeRow],
        walks: Sequence[LiveSequence],
    ) -> Sequence[StepOutput | None]:
        """Run them; outputs of the chunks, then of the rows. walks: sequences of rows whose
        grammars follow what was committed."""
        for seq in walks:
            if seq.constraint is not None:
                seq.constraint.catch_up(seq.tokens, seq.answer_from)
        if not rows:
            return self._runner.prefill(chunks) if chunks else []
        if not chunks:
            return self._runner.decode(rows)
        read, decoded = self._runner.mixed(chunks, rows)
        return [*read, *decoded]

    @staticmethod
    def _walks(plan: Plan) -> list[LiveSequence]:
        return [seq for seq, _ in plan.rows if seq.constraint is not None]

    def _decode_row(self, seq: LiveSequence, drafts: int) -> DecodeRow:
        return DecodeRow(
            history=seq.tokens,
            prompt_len=seq.answer_from,
            block_table=seq.blocks,
            state_slot=seq.state_slot,
            sampling=seq.request.sampling,
            max_draft=drafts,
            constraint=seq.constraint,
            pictures=seq.request.pictures,
        )

    def _prefill_chunk(self, chunk: Chunk) -> PrefillChunk:
        seq = chunk.seq
        first = max(0, chunk.start - self._runner.caps.lookback)
        lookback = tuple(seq.tokens[first : chunk.start])
        pictures = seq.request.pictures
        following: Sequence[int] = ()
        wanted = None if seq.preemptions else seq.request.prompt_logprobs
        if wanted is not None:
            following = [*seq.tokens[chunk.start + 1 : chunk.end + 1], -1][
                : chunk.end - chunk.start
            ]
        if pictures:
            lookback = text_only(lookback, first, pictures)
            pictures = overlapping(pictures, chunk.start, chunk.end)
        resumed = seq.prompt_len - seq.answer_from
        if chunk.sample and seq.constraint is not None and resumed:
            seq.constraint.catch_up(seq.tokens, seq.answer_from)
        return PrefillChunk(
            token_ids=np.asarray(seq.tokens[chunk.start : chunk.end], dtype=np.int64),
            start=chunk.start,
            lookback=lookback,
            block_table=seq.blocks,
            state_slot=seq.state_slot,
            sampling=seq.request.sampling,
            sample=chunk.sample,
            snapshots=chunk.snapshots,
            prompt_len=seq.prompt_len,
            prompt=seq.tokens if chunk.sample else (),
            constraint=seq.constraint if chunk.sample else None,
            resumed=resumed,
            pictures=pictures,
            prompt_logprobs=wanted,
            following=following,
            valid_start=seq.prefix.start if seq.prefix.replayed else 0,
            entries_from=seq.prefix.n_tokens if seq.prefix.replayed else 0,
        )

    def _publish(self, plan: Plan) -> None:
        """Offer full blocks and border states to the store, before anyone hears of the step."""
        for chunk in plan.chunks:
            self._publish_blocks(chunk.seq, chunk.snapshots)
            self._sink.chunk_done(chunk)
        if self._link is None:
            return
        for seq, _ in plan.rows:
            border = seq.num_tokens // self._runner.layout.block_tokens
            if border > seq.published_blocks:
                # Rings keep window + draft length rows: a slot that has moved on by less than one
                # step is still exact for the border it passed.
                position = border * self._runner.layout.block_tokens
                state = ((position, seq.state_slot),) if seq.state_slot else ()
                self._publish_blocks(seq, state)
            elif seq.finish_reason is not None and seq.border_state is not None:
                self._publish_blocks(seq, ())

    def _publish_blocks(self, seq: LiveSequence, states: Sequence[tuple[int, int]]) -> None:
        full = seq.num_tokens // self._runner.layout.block_tokens
        fresh = [(b, seq.blocks[b]) for b in range(seq.published_blocks, full)]
        ends = seq.finish_reason is not None and seq.border_state is not None
        if self._link is not None and (fresh or states or ends) and not seq.aborting:
            self._link.publish(seq, fresh, states)
        seq.published_blocks = max(seq.published_blocks, full)
