"""Policies side by side on generated loads: plan on recorded steps, judge on unseen ones."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from deepinfer_eplb.bench.loads import generate
from deepinfer_eplb.errors import LoadError
from deepinfer_eplb.evaluation import evaluate
from deepinfer_eplb.placement import initial_placement, moved_share
from deepinfer_eplb.planning.planner import Plan, plan
from deepinfer_eplb.planning.published import per_step_policy, totals_policy

STEPS: Final = 100
HEAD: Final = (
    f"{'load':8}{'seed':>5} {'policy':15}{'B':>8}{'floor':>8}{'excess':>8}{'sys':>8}"
    f"{'ratio':>7}{'moved':>7}{'swaps':>7}{'CPU s':>7}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """Size of a problem."""

    layers: int = 58
    experts: int = 384
    ranks: int = 64
    slots: int = 448

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.experts} experts, {self.ranks} ranks, {self.slots} slots"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace.

    B, floor: on the counts of unseen steps; sys: B - 1 on their expectations (perfect is 0);
    ratio: sys relative to the per-step policy's (of excesses where no expectations are
    known); moved: share of slots filled from another rank; swaps: moves of the search in all
    layers; cpu_s: median CPU seconds.
    """

    kind: str
    seed: int
    policy: str
    B: float
    floor: float
    sys: float
    ratio: float
    moved: float
    swaps: int
    cpu_s: float

    def line(self) -> str:
        return (
            f"{self.kind:8}{self.seed:5d} {self.policy:15}{self.B:8.4f}{self.floor:8.4f}"
            f"{self.B - self.floor:8.4f}{self.sys:8.4f}{self.ratio:7.2f}{self.moved:7.3f}"
            f"{self.swaps:7d}{self.cpu_s:7.2f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: figures that do not exist are None."""
        return {k: None if v != v else v for k, v in asdict(self).items()}


def timed(make: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """(result, median CPU seconds of `repeats` runs)."""
    times: list[float] = []
    result: Any = None
    for _ in range(max(repeats, 1)):
        start = time.process_time()
        result = make()
        times.append(time.process_time() - start)
    return result, statistics.median(times)


def compare(kind: str, seed: int, case: Case, repeats: int = 1) -> list[Row]:
    """Place by the first 100 steps, plan on the next 100, judge on the 100 after those."""
    trace = generate(kind, seed, steps=3 * STEPS, layers=case.layers, experts=case.experts)
    past, window = trace.counts[:STEPS], trace.counts[STEPS : 2 * STEPS]
    unseen, truth = trace.counts[2 * STEPS :], trace.expected[2 * STEPS :]
    return _rows(kind, seed, case, past, window, unseen, truth, repeats)


def compare_recorded(name: str, loads: Any, case: Case, repeats: int = 1) -> list[Row]:
    """The same on recorded loads [steps, layers, experts], a third of the steps each."""
    third = loads.shape[0] // 3
    if third < 1:
        raise LoadError(f"bench wants at least 3 recorded steps, got {loads.shape[0]}")
    past, window, unseen = loads[:third], loads[third : 2 * third], loads[2 * third :]
    return _rows(name[:8], 0, case, past, window, unseen, None, repeats)


def _rows(
    kind: str, seed: int, case: Case, past: Any, window: Any, unseen: Any, truth: Any, repeats: int
) -> list[Row]:
    G, S = case.ranks, case.slots
    old = plan(past, G, S).phy2log
    ours: dict[str, Callable[[], Plan]] = {
        "plan, from old": lambda: plan(window, G, S, old),
        "plan, full": lambda: plan(window, G, S),
    }
    others: dict[str, Callable[[], Any]] = {
        "per-step": lambda: per_step_policy(window, G, S),
        "totals": lambda: totals_policy(window, G, S),
        "linear": lambda: initial_placement(case.layers, case.experts, S),
        "keep": lambda: old,
    }
    results = {name: (*timed(make, 1), 0) for name, make in others.items()}
    for name, make in ours.items():
        made, seconds = timed(make, repeats)
        results[name] = (made.phy2log, seconds, made.swaps + made.replica_moves)

    def judged(placement: Any) -> tuple[Any, float, float]:
        seen = evaluate(unseen, placement, G)
        if truth is None:
            return seen, math.nan, seen.excess
        expected = evaluate(truth, placement, G).B - 1.0
        return seen, expected, expected

    base = judged(results["per-step"][0])[2]
    rows: list[Row] = []
    for name, (placement, seconds, swaps) in results.items():
        seen, expected, compared = judged(placement)
        rows.append(
            Row(
                kind=kind,
                seed=seed,
                policy=name,
                B=seen.B,
                floor=seen.floor,
                sys=expected,
                ratio=compared / base if base > 0 else math.nan,
                moved=moved_share(old, placement, G),
                swaps=swaps,
                cpu_s=seconds,
            )
        )
    return rows
