"""Where experts lie and how they move, by deepinfer_eplb, as a group of processes uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_eplb import (
    Balancer,
    CommitError,
    EplbError,
    Gate,
    GlooTransport,
    Plan,
    StepEvent,
    dispatch,
    initial_placement,
    slots_for,
)

__all__ = [
    "Balancer",
    "CommitError",
    "EplbError",
    "GlooTransport",
    "MeasuredGate",
    "StepEvent",
    "dispatch",
    "initial_placement",
    "slots_for",
]


@dataclass(frozen=True)
class MeasuredGate(Gate):
    """Judges a plan by what a step of this model spends in its experts, as measured while it runs.

    moe_s: seconds a step spends in all expert layers now.
    """

    moe_s: Callable[[], float] = lambda: 0.0

    def worth(self, made: Plan, steps_until_next: int) -> bool:
        """See `Gate.worth`."""
        now = Gate(self.moe_s(), self.expert_bytes, self.bytes_per_s)
        return now.worth(made, steps_until_next)
