"""The loop of one rank of a data-parallel group: what kind of step to run is put to the vote."""

from __future__ import annotations

from typing import Any

from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.plan import Plan
from deepinfer_engine.core.votes import Ballot, StepKind, Tally, Vote


class VotingLoop(EngineLoop):
    """As `EngineLoop`; all ranks call `step` equally often. Each has requests of its own.

    A rank with nothing to do in a step runs an empty pass: others' tokens may need its experts.
    """

    def __init__(self, *args: Any, ballot: Ballot, vote: Vote, **options: Any) -> None:
        """See `EngineLoop`."""
        super().__init__(*args, **options)
        self._ballot = ballot
        self._vote = vote
        self.tally = Tally(0, 0, 0)
        """Of the last step; the same in every rank."""
        self.kind: StepKind | None = None
        """What the last step was, None: nobody had anything to run."""
        self.sums = 0
        """Votes so far."""

    def step(self, now: float) -> Plan | None:
        """One step of the group; what this rank ran, or None. Raises EngineLost."""
        self._admit(now)
        with self._changed:
            wish = self.scheduler.wish(now)
        self.tally = Tally(*self._add(*wish.numbers()))
        if self.tally.idle:
            self.kind = None
            return None
        plan: Plan | None = None
        kind = self._vote.decide(self.tally)
        if kind == "prefill":
            plan = self._chosen(now, "prefill")
            # What ranks want does not look at memory: without this, a full group with a queue
            # would run empty prompt steps for ever.
            if self._add(plan is not None) == (0,):
                kind = "decode"
        if kind == "decode":
            plan = self._chosen(now, "decode")
        self._vote.ran(kind)
        self.kind = kind
        if plan is None:
            self._runner.mixed((), ())
        else:
            self._run(plan)
        return plan

    def _add(self, *values: int) -> tuple[int, ...]:
        self.sums += 1
        return self._ballot.add(values)
