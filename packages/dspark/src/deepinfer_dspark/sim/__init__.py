"""What scheduled verification gains, simulated; needs numpy only."""

from deepinfer_dspark.sim.simulator import (
    SEPARATING,
    Acceptance,
    GroupOutcome,
    Machine,
    Outcome,
    ReplayStream,
    fit_machine,
    simulate,
    simulate_group,
    simulate_mean,
)

__all__ = [
    "SEPARATING",
    "Acceptance",
    "GroupOutcome",
    "Machine",
    "Outcome",
    "ReplayStream",
    "fit_machine",
    "simulate",
    "simulate_group",
    "simulate_mean",
]
