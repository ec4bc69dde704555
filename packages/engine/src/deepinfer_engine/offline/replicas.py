"""`LLM(dp=N)`: the first rank's loop, which gives requests to N ranks and hears what they say.

Requests go to the rank that owes the fewest tokens. Each rank schedules its own; all run one
forward pass a step and vote on whether it reads prompts (`core.votes`). Nothing runs between two
steps of the first rank, so an engine that nobody uses costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_engine.core.constraint import SequenceConstraint
from deepinfer_engine.core.loop import Report
from deepinfer_engine.core.plan import Plan, Progress
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.types import FinishReason, GenerateRequest, TokenLogprob, Usage
from deepinfer_engine.core.voting_loop import VotingLoop
from deepinfer_engine.core.windows import Prefix
from deepinfer_engine.errors import EngineLost
from deepinfer_engine.offline.build import EngineSpec
from deepinfer_engine.offline.replica import request_body
from deepinfer_engine.parallel.leader import threads_each
from deepinfer_engine.parallel.messages import Balancing, Setup
from deepinfer_engine.parallel.replica import ReplicaGroup

DEADLINE_S = 30.0
"""A rank that does not answer for so long is lost, and with it the group."""
_IDLE_S = 1e-3


def replica_group(
    spec: EngineSpec, ranks: int, deadline_s: float, threads: int | None = None
) -> ReplicaGroup:
    """Start the other ranks; from the main thread, with which they end. threads: of each."""
    setup = Setup(
        rank=0,
        size=ranks,
        model=spec.directory,
        dtype=spec.dtype,
        cache_quant=spec.cache_quant,
        replay=spec.replay,
        keep=spec.replay_keep,
        num_blocks=spec.num_blocks,
        num_slots=spec.num_state_slots,
        threads=threads_each(ranks, threads),
        store="",
        deadline_s=deadline_s,
        pools={},
        balancing=Balancing(redundant=ranks),
    )
    others = {**spec.body(), "vision": False, "directory": str(Path(spec.directory).resolve())}
    return ReplicaGroup(setup, "deepinfer_engine.offline.replica", others)


@dataclass(slots=True)
class _Elsewhere:
    """A request that another rank runs."""

    rank: int
    seq: LiveSequence

    @property
    def owed(self) -> int:
        return self.seq.prompt_len + self.seq.request.sampling.max_tokens - self.seq.output_len


class ReplicaLoop(VotingLoop):
    """As `EngineLoop`, over all ranks. Grammars and pictures stay with this one."""

    def __init__(self, *args: Any, group: ReplicaGroup, **options: Any) -> None:
        """See `VotingLoop`."""
        super().__init__(*args, **options)
        self._group = group
        self._elsewhere: dict[str, _Elsewhere] = {}
        self._submitted: list[list[dict[str, Any]]] = [[] for _ in group.members]
        self._aborted: list[list[str]] = [[] for _ in group.members]
        self._reports = [Report(member.process.pid, {}, {}) for member in group.members]

    def step(self, now: float) -> Plan | None:
        """One step of the group; None where this rank ran nothing. Raises EngineLost."""
        channels = [member.channel for member in self._group.members]
        with self._changed:
            submitted, self._submitted = self._submitted, [[] for _ in channels]
            aborted, self._aborted = self._aborted, [[] for _ in channels]
        for channel, new, gone in zip(channels, submitted, aborted, strict=True):
            channel.send({"submit": new, "abort": gone})
        plan = super().step(now)
        for i, channel in enumerate(channels):
            answer = channel.receive()
            if answer is None or "made" not in answer:
                failed = self._group.failure or (answer or {}).get("failed", "no answer")
                raise EngineLost(f"a rank of the group is lost: {failed}")
            if answer["report"] is not None:
                self._reports[i] = Report(self._reports[i].pid, *answer["report"])
            for made in answer["made"]:
                self._hear(*made)
        return plan

    def submit(
        self,
        request: GenerateRequest,
        key: str,
        now: float,
        constraint: SequenceConstraint | None = None,
    ) -> None:
        """See `EngineLoop.submit`."""
        stays = constraint is not None or request.pictures or request.prompt_logprobs is not None
        with self._changed:
            rank = 0 if stays else self._least()
            if rank:
                seq = LiveSequence(request, key, now)
                self._elsewhere[key] = _Elsewhere(rank, seq)
                self._submitted[rank - 1].append({**request_body(request), "id": key})
                self._notify()
        if not rank:
            super().submit(request, key, now, constraint)

    def abort(self, key: str) -> None:
        """See `EngineLoop.abort`."""
        with self._changed:
            gone = self._elsewhere.pop(key, None)
            if gone is not None:
                self._aborted[gone.rank - 1].append(key)
        if gone is None:
            super().abort(key)
        else:
            self._emit([Progress(gone.seq, gone.seq.output_len, (), (), "abort")])

    def abort_all(self, reason: FinishReason) -> None:
        """See `EngineLoop.abort_all`."""
        with self._changed:
            gone, self._elsewhere = self._elsewhere, {}
        super().abort_all(reason)
        self._emit(Progress(one.seq, one.seq.output_len, (), (), reason) for one in gone.values())

    def wait_for_work(self) -> None:
        """See `EngineLoop.wait_for_work`. What others wait for is not heard of here."""
        if not self._elsewhere:
            super().wait_for_work()
        elif self.tally.idle:
            time.sleep(_IDLE_S)

    @property
    def unfinished(self) -> int:
        """Of all ranks."""
        return super().unfinished + len(self._elsewhere)

    @property
    def others(self) -> Sequence[Report]:
        """See `EngineLoop.others`: the other ranks, as of their last word."""
        return tuple(self._reports)

    def _least(self) -> int:
        owed = [0] * (1 + len(self._group.members))
        for seq in self.scheduler.at.by_key.values():
            owed[0] += seq.prompt_len + seq.request.sampling.max_tokens - seq.output_len
        for one in self._elsewhere.values():
            owed[one.rank] += one.owed
        return owed.index(min(owed))

    def _hear(
        self,
        key: str,
        index: int,
        tokens: list[int],
        logprobs: list[Any],
        finish: FinishReason | None,
        usage: dict[str, Any] | None,
    ) -> None:
        with self._changed:
            one = self._elsewhere.get(key)
            if one is not None and finish is not None:
                del self._elsewhere[key]
        if one is None:
            return  # aborted here
        seq = one.seq
        seq.tokens.extend(tokens)
        if usage is not None:
            used = Usage(**usage)
            seq.drafted_tokens, seq.accepted_tokens = used.drafted_tokens, used.accepted_tokens
            begins = used.cached_tokens - used.replayed_tokens
            seq.prefix = Prefix(used.cached_tokens, begins, used.window)
        said = tuple(
            TokenLogprob(token, lp, tuple((t, p) for t, p in top)) for token, lp, top in logprobs
        )
        self._emit([Progress(seq, index, tuple(tokens), said, finish)])
