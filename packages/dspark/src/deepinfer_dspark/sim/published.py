"""Published gains of adaptive over fixed verification, and what the simulator makes of them.

A machine is fitted on the first and the last of a few published points only; everything between is
then a prediction. Fit and prediction use different seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deepinfer_dspark.sim.simulator import (
    SEPARATING,
    Acceptance,
    Machine,
    Outcome,
    fit_machine,
    simulate_mean,
)

Points = tuple[tuple[int, float], ...]

GAIN_POINTS: Final[Points] = ((16, -0.015), (96, 0.11))
"""Throughput gain by running sequences, five drafts; the text adds 4 to 7% near production load."""

ROCM_POINTS: Final[Points] = (
    (4, -0.070), (8, -0.083), (16, -0.047), (32, -0.054), (64, 0.064), (128, 0.180), (256, 0.697),
)  # fmt: skip
"""Adaptive against fixed by concurrency, seven drafts, a port to another accelerator."""

BUDGET_POINTS: Final[Points] = ((25, 5.0), (50, 4.6), (100, 4.0), (150, 3.7), (200, 3.5))
"""Rows verified a request, its anchor included, by concurrent requests, five drafts."""

SECOND_POINT: Final = (64, (0.05, 0.10))
"""Gain of another engine with seven drafts up to so many requests. Nothing is fitted to it."""

FIT_SEEDS: Final = (0, 1, 2)
SEEDS: Final = (11, 12, 13, 14)


@dataclass(frozen=True, slots=True)
class Curve:
    """machine: as fitted on `fitted` points; outcomes: predictions; published: what to compare."""

    name: str
    machine: Machine
    fitted: Points
    published: Points
    outcomes: tuple[Outcome, ...]


def _curve(
    name: str,
    fitted: Points,
    published: Points,
    requests: Sequence[int],
    model: Acceptance,
    gamma: int,
    steps: int,
    per_token_range: tuple[float, float],
    fit_seeds: Sequence[int] = FIT_SEEDS,
    seeds: Sequence[int] = SEEDS,
) -> Curve:
    machine = fit_machine(
        fitted[0],
        fitted[-1],
        gamma=gamma,
        model=model,
        steps=steps,
        seeds=fit_seeds,
        per_token_range=per_token_range,
    )
    outcomes = tuple(
        simulate_mean(R, seeds, gamma=gamma, machine=machine, model=model, steps=steps)
        for R in requests
    )
    return Curve(name, machine, fitted, published, outcomes)


def gain_curves(
    requests: Sequence[int] = (16, 24, 32, 48, 64, 96),
    *,
    gamma: int = 5,
    steps: int = 400,
    fit_seeds: Sequence[int] = FIT_SEEDS,
    seeds: Sequence[int] = SEEDS,
) -> tuple[Curve, Curve]:
    """The main curve with the default and with the better separating confidences."""
    span = (0.005, 0.3)
    default, separating = (
        _curve(
            name, GAIN_POINTS, GAIN_POINTS, requests, model, gamma, steps, span, fit_seeds, seeds
        )
        for name, model in (("default", Acceptance()), ("separating", SEPARATING))
    )
    return default, separating


def rocm_curve(*, steps: int = 200) -> Curve:
    """The second curve, with its own machine: fitted on 16 (-4.7%) and 128 (+18%) requests.

    The acceptance mean is assumed (about three tokens a round), not published.
    """
    fitted = tuple(p for p in ROCM_POINTS if p[0] in (16, 128))
    sizes = [r for r, _ in ROCM_POINTS]
    model = Acceptance(mean=0.55)
    return _curve("rocm", fitted, ROCM_POINTS, sizes, model, 7, steps, (0.002, 0.3))


def sensitivity(
    requests: int = 96, *, steps: int = 400, seeds: Sequence[int] = SEEDS
) -> tuple[tuple[str, Outcome], ...]:
    """The default machine with confidences made worse: error of their logit, and temperatures that
    make them too bold (below 1) or too shy."""
    changes = {
        "as modelled": {},
        "noise 0.35": {"conf_noise": 0.35},
        "noise 0.7": {"conf_noise": 0.7},
        "noise 1.4": {"conf_noise": 1.4},
        "temperature 0.6": {"miscalibration": 0.6},
        "temperature 1.6": {"miscalibration": 1.6},
    }
    machine = Machine(per_token_ms=0.036, ragged_overhead=0.028)
    return tuple(
        (
            name,
            simulate_mean(requests, seeds, machine=machine, model=Acceptance(**more), steps=steps),
        )
        for name, more in changes.items()
    )


def held_back(
    machine: Machine, *, steps: int = 400, seeds: Sequence[int] = SEEDS
) -> tuple[tuple[str, float, str], ...]:
    """(what, simulated, published) of points that no fit has used, on the machine of the main
    curve with the default confidences."""
    rows: list[tuple[str, float, str]] = []
    for requests, published in BUDGET_POINTS:
        o = simulate_mean(requests, seeds, machine=machine, steps=steps)
        rows.append((f"rows a request, {requests} requests", 6.0 * o.rows, f"{published:g}"))
    requests, (low, high) = SECOND_POINT
    o = simulate_mean(requests, seeds, gamma=7, machine=machine, steps=steps)
    rows.append((f"gain, {requests} requests, seven drafts", o.gain, f"{low:+.2f} to {high:+.2f}"))
    return tuple(rows)
