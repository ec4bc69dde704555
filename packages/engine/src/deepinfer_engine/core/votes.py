"""Prompts or running sequences: what all ranks of a data-parallel group do next.

Ranks that share experts run the same number of forward passes, so a rank that reads a long prompt
holds up all others. Each tells what it wants; the sums decide, and are the same everywhere. How
many sums are made follows from what all ranks know, never from one rank's queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

StepKind = Literal["prefill", "decode"]
VotePolicy = Literal["urgent", "upstream"]

SHARE = 0.75
"""Policy "urgent": of the ranks that want to read, where nobody is urgent."""
LEAST_DECODES = 4
"""... and decode steps before it."""


class Ballot(Protocol):
    """The group's sums. Every rank calls it, as often as all others."""

    def add(self, values: Sequence[int]) -> tuple[int, ...]:
        """Sums over all ranks. Raises EngineLost where one did not answer in its time."""
        ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What one rank knows of itself, without looking at memory."""

    want: bool
    """There is a prompt that it would read."""
    busy: bool
    """Sequences run."""
    urgent: bool
    """Its oldest prompt has waited for `prefill_urgent_s`."""

    def numbers(self) -> tuple[int, int, int]:
        return int(self.want), int(self.busy), int(self.urgent)


@dataclass(frozen=True, slots=True)
class Tally:
    """Ranks that want, are busy, are urgent."""

    want: int
    busy: int
    urgent: int

    @property
    def idle(self) -> bool:
        """Nobody has anything to run."""
        return not (self.want or self.busy)


@dataclass(slots=True)
class Vote:
    """One group's rule; every rank has one, and all go through the same states.

    policy "upstream": at every `prefill_attempt_interval`-th decode step (0 included) an ALL point:
    prompts are read if every rank wants to. At every `prefill_any_attempt_interval`-th an ANY
    point, which wins over ALL: if some rank wants to.
    policy "urgent": at once where nobody is busy; beside others when a prompt has waited long, or
    most ranks want to and `LEAST_DECODES` steps have passed.
    """

    ranks: int
    policy: VotePolicy = "urgent"
    prefill_attempt_interval: int = 70
    prefill_any_attempt_interval: int = 100
    decode_steps: int = field(default=0, init=False)
    """Since the last step that read prompts."""

    def decide(self, tally: Tally) -> StepKind:
        """What to try."""
        wants = self._upstream(tally) if self.policy == "upstream" else self._urgent(tally)
        return "prefill" if wants else "decode"

    def ran(self, kind: StepKind) -> None:
        """A step is over. One that wanted to read and could not, anywhere, was a decode step."""
        self.decode_steps = self.decode_steps + 1 if kind == "decode" else 0

    def _upstream(self, tally: Tally) -> bool:
        at = self.decode_steps
        if at and at % self.prefill_any_attempt_interval == 0:
            return tally.want > 0
        return at % self.prefill_attempt_interval == 0 and tally.want == self.ranks

    def _urgent(self, tally: Tally) -> bool:
        if not tally.want:
            return False
        if not tally.busy:
            return True
        if tally.urgent and self.decode_steps:  # a long prompt must not starve those that run
            return True
        return tally.want >= SHARE * self.ranks and self.decode_steps >= LEAST_DECODES
