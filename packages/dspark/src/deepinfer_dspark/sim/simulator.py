"""Simulation of confidence-scheduled verification: the real scheduler on modelled acceptance.

Acceptance of position k of request r at step t has the logit
    mean + quality_r + mood_{r,t} + noise_{r,t,k}
with an AR(1) mood; the drafter's confidence is the same logit plus its own noise, divided by a
miscalibration temperature. Time comes from a step table. What it shows is the shape of the gain,
not the figures of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.budget import BudgetScheduler, ConfidenceHistory, Mode
from deepinfer_dspark.calibration import sigmoid
from deepinfer_dspark.step_table import StepTable

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Logit model of acceptance; standard deviations are of logits.

    step_correlation: AR(1) coefficient of the mood; turnover: share of requests replaced a step;
    conf_noise: error of the drafter's logit; miscalibration: its temperature (1 = calibrated).
    """

    mean: float = 1.1
    request_sd: float = 0.5
    step_sd: float = 1.2
    step_correlation: float = 0.5
    position_sd: float = 0.6
    turnover: float = 0.01
    conf_noise: float = 0.0
    miscalibration: float = 1.0


SEPARATING = Acceptance(
    mean=1.2, request_sd=2.5, step_sd=2.5, step_correlation=0.97, position_sd=0.0
)
"""More variance between requests and moods, less inside a round: cut drafts were unlikely ones."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Step time in ms: base + per_token * (tokens rounded up to `grid`) + draft, times 1 +
    ragged_overhead where requests have different lengths."""

    base_ms: float = 12.5
    per_token_ms: float = 0.034
    draft_ms: float = 1.5
    grid: int = 8
    ragged_overhead: float = 0.026

    def table(self, top: int) -> StepTable:
        """The staircase up to `top` tokens."""
        return StepTable.linear(self.base_ms, self.per_token_ms, grid=self.grid, top=top)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated comparison at R requests.

    gain: throughput of the scheduler over verifying everything, minus 1; drafts, rows: verified
    drafts, and rows with anchors, as a share of verifying everything; length_fixed,
    length_dynamic: mean tokens a request gains a round; gain_sd: standard deviation of the gain
    over seeds, 0 for one run.
    """

    requests: int
    gain: float
    drafts: float
    rows: float
    length_fixed: float
    length_dynamic: float
    gain_sd: float = 0.0

    @property
    def length_loss(self) -> float:
        """Share of the accepted length that scheduling gives up."""
        return 1.0 - self.length_dynamic / self.length_fixed


class AcceptanceStream:
    """Confidences and outcomes of rounds, step after step, for R requests."""

    def __init__(self, model: Acceptance, requests: int, gamma: int, seed: int) -> None:
        self._m, self._shape = model, (requests, gamma)
        self._rng = np.random.default_rng(seed)
        self._quality = self._rng.normal(0.0, model.request_sd, requests)
        self._mood = self._rng.normal(0.0, model.step_sd, requests)

    def next(self) -> tuple[Float, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(conf [R, gamma], drafts that would be accepted [R], indices of new requests)."""
        m, rng, (R, gamma) = self._m, self._rng, self._shape
        fresh = np.flatnonzero(rng.random(R) < m.turnover)
        self._quality[fresh] = rng.normal(0.0, m.request_sd, fresh.size)
        keep = m.step_correlation
        shock = rng.normal(0.0, m.step_sd, R) * np.sqrt(1.0 - keep**2)
        self._mood = keep * self._mood + shock
        z = (m.mean + self._quality + self._mood)[:, None] + rng.normal(
            0.0, m.position_sd, (R, gamma)
        )
        accepted = np.logical_and.accumulate(rng.random((R, gamma)) < sigmoid(z), axis=1)
        heard = (z + rng.normal(0.0, m.conf_noise, (R, gamma))) / m.miscalibration
        return sigmoid(heard), accepted.sum(axis=1), fresh


class ReplayStream:
    """Recorded rounds instead of a model: conf [N, gamma], accepted [N], drawn with a seed."""

    def __init__(self, conf: Float, accepted: Any, requests: int, seed: int) -> None:
        self._conf, self._accepted = conf, np.asarray(accepted, dtype=np.int64)
        self._requests, self._rng = requests, np.random.default_rng(seed)

    def next(self) -> tuple[Float, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """As `AcceptanceStream.next`; rounds of a request are independent draws."""
        at = self._rng.integers(0, self._accepted.size, self._requests)
        return self._conf[at], self._accepted[at], np.empty(0, dtype=np.int64)


def simulate(
    requests: int,
    *,
    gamma: int = 5,
    machine: Machine | None = None,
    model: Acceptance | None = None,
    mode: Mode = "causal",
    steps: int = 1500,
    seed: int = 0,
    stale: bool = True,
    min_gain: float = 0.0,
    stream: AcceptanceStream | ReplayStream | None = None,
) -> Outcome:
    """Compare a scheduler with verifying everything on the same acceptances.

    stale: budget from the round before (as an overlapped engine must), else from the current one.
    A step in which the scheduler verifies everything runs on the static path, without overhead.
    """
    machine = Machine() if machine is None else machine
    model = Acceptance() if model is None else model
    source = AcceptanceStream(model, requests, gamma, seed) if stream is None else stream
    full = requests * gamma
    scheduler = BudgetScheduler(
        machine.table(requests * (gamma + 1) + machine.grid),
        gamma,
        mode,
        draft_ms=machine.draft_ms,
        min_gain=min_gain,
    )
    memory = ConfidenceHistory(requests, gamma)
    slots = np.arange(requests)
    fixed_step = scheduler.table.cost(requests + full) + machine.draft_ms
    time = tokens = fixed_tokens = 0.0
    drafts = 0
    for _ in range(steps):
        conf, would, fresh = source.next()
        memory.reset(fresh)
        memory.record(slots, conf)
        budget = scheduler.budget(memory.older(slots) if stale else conf, deterministic=True)
        lens = scheduler.allocate(budget, conf)
        used = int(lens.sum())
        ragged = used < full
        step = scheduler.table.cost(requests + used) + machine.draft_ms
        time += step * (1.0 + machine.ragged_overhead if ragged else 1.0)
        tokens += requests + float(np.minimum(would, lens).sum())
        fixed_tokens += requests + float(would.sum())
        drafts += used
    rate, fixed_rate = tokens / time, fixed_tokens / (steps * fixed_step)
    return Outcome(
        requests=requests,
        gain=rate / fixed_rate - 1.0,
        drafts=drafts / (steps * full),
        rows=(drafts + steps * requests) / (steps * (full + requests)),
        length_fixed=fixed_tokens / (steps * requests),
        length_dynamic=tokens / (steps * requests),
    )


def simulate_mean(requests: int, seeds: Sequence[int], **options: Any) -> Outcome:
    """Mean of `simulate` over several seeds. options: those of `simulate` but seed and stream."""
    runs = [simulate(requests, seed=seed, **options) for seed in seeds]
    mean = {
        f.name: float(np.mean([getattr(o, f.name) for o in runs]))
        for f in fields(Outcome)
        if f.name != "requests"
    }
    mean["gain_sd"] = float(np.std([o.gain for o in runs]))
    return Outcome(requests, **mean)


def fit_machine(
    low: tuple[int, float],
    high: tuple[int, float],
    *,
    gamma: int = 5,
    model: Acceptance | None = None,
    machine: Machine | None = None,
    steps: int = 400,
    seeds: Sequence[int] = (0,),
    per_token_range: tuple[float, float] = (0.005, 0.3),
) -> Machine:
    """Time a token and ragged overhead that give two published gains: (requests, gain) each.

    Gains are means over `seeds`; every candidate machine meets the same acceptances, so the noise
    of the fit is that of the streams, not of the bisection. The overhead does not change what the
    scheduler does, so it follows from `low` in closed form; the time a token is found by bisection
    on `high`, whose gain rises with it.
    """
    start = Machine() if machine is None else machine

    def with_slope(slope: float) -> tuple[Machine, float]:
        free = replace(start, per_token_ms=slope, ragged_overhead=0.0)

        def run(requests: int) -> float:
            return simulate_mean(
                requests, seeds, gamma=gamma, machine=free, model=model, steps=steps
            ).gain

        overhead = (1.0 + run(low[0])) / (1.0 + low[1]) - 1.0
        return replace(free, ragged_overhead=overhead), (1.0 + run(high[0])) / (
            1.0 + overhead
        ) - 1.0

    a, b = per_token_range
    for _ in range(18):
        middle = (a * b) ** 0.5
        if with_slope(middle)[1] < high[1]:
            a = middle
        else:
            b = middle
    return with_slope((a * b) ** 0.5)[0]


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Throughput gain over verifying everything: every rank for itself, and one size for all."""

    spread: float
    independent: float
    group: float


def simulate_group(
    ranks: int = 16,
    requests: int = 64,
    spread: float = 0.0,
    *,
    gamma: int = 5,
    machine: Machine | None = None,
    model: Acceptance | None = None,
    steps: int = 300,
    seed: int = 0,
) -> GroupOutcome:
    """Ranks with requests +- spread; every step lasts as long as the fullest rank takes.

    A simulation under that assumption, with estimates of the current round.
    """
    machine = Machine(ragged_overhead=0.0) if machine is None else machine
    model = Acceptance() if model is None else model
    rng = np.random.default_rng([seed, ranks])
    sizes = np.maximum(1, np.rint(rng.normal(requests, spread, ranks))).astype(int).tolist()
    streams = [AcceptanceStream(model, n, gamma, seed * 1000 + i) for i, n in enumerate(sizes)]
    table = machine.table(max(sizes) * (gamma + 1) + machine.grid)
    alone = BudgetScheduler(table, gamma, draft_ms=machine.draft_ms)
    totals: dict[str, float] = {"fixed": 0.0, "alone": 0.0, "group": 0.0}
    times = dict(totals)

    def duration(used: list[int]) -> float:
        fullest = max(n + u for n, u in zip(sizes, used, strict=True))
        return table.cost(fullest) + machine.draft_ms

    for _ in range(steps):
        rounds = [s.next() for s in streams]
        budgets = {
            "fixed": [n * gamma for n in sizes],
            "alone": [alone.budget(conf) for conf, _, _ in rounds],
            "group": group_budgets([conf for conf, _, _ in rounds], table, gamma, machine.draft_ms),
        }
        for name, budget in budgets.items():
            lens = [alone.allocate(b, conf) for b, (conf, _, _) in zip(budget, rounds, strict=True)]
            times[name] += duration([int(x.sum()) for x in lens])
            totals[name] += sum(
                conf.shape[0] + float(np.minimum(would, x).sum())
                for x, (conf, would, _) in zip(lens, rounds, strict=True)
            )
    rate = {name: totals[name] / times[name] for name in totals}
    return GroupOutcome(
        spread, rate["alone"] / rate["fixed"] - 1.0, rate["group"] / rate["fixed"] - 1.0
    )


def group_budgets(confs: list[Float], table: StepTable, gamma: int, draft_ms: float) -> list[int]:
    """What every rank of a group would choose, computed by two passes over one in-process sum."""
    collected: list[Float] = []

    class Collect:
        def all_reduce_sum(self, values: Float) -> Float:
            collected.append(values)
            return values

    class Answer:
        def all_reduce_sum(self, values: Float) -> Float:
            return np.sum(collected, axis=0)

    for conf in confs:
        BudgetScheduler(table, gamma, group=Collect(), draft_ms=draft_ms).budget(conf)
    final = BudgetScheduler(table, gamma, group=Answer(), draft_ms=draft_ms)
    return [final.budget(conf) for conf in confs]
