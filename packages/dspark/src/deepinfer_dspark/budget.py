"""How many drafts of the whole batch to verify, and whose.

Verification stays lossless only if the decision about draft k of a request looks at nothing that
depends on draft k or later drafts of it. Two rules give that here:

* `budget` (how many) looks at confidences of an *older* round, except in mode "exact", which is
  allowed only when no draft carries information: point-mass drafts or a greedy target;
* `allocate` (whose) takes the largest *current* survivals, non-increasing inside a request, equal
  ones in the order of position, so that admission reveals one draft at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import to_host
from deepinfer_dspark.errors import LosslessnessError, ShapeError
from deepinfer_dspark.step_table import RuntimeCorrection, StepTable

Mode = Literal["causal", "exact", "uniform", "threshold", "fixed"]
Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
MODES: Final = ("causal", "exact", "uniform", "threshold", "fixed")


class GroupReducer(Protocol):
    """Sums a small vector over the ranks of an expert-parallel group."""

    def all_reduce_sum(self, values: Float) -> Float:
        """float64 [n] -> float64 [n]; every rank of the group calls it once a round."""
        ...


def survival(conf: npt.NDArray[np.floating[Any]], lengths: Any | None = None) -> Float:
    """Running product of conditional confidences, 0 where there is no draft.

    conf: float [R, gamma], values are clipped to [0, 1] (NaN counts as 0); lengths: int [R].
    Returns float64 [R, gamma], non-increasing along gamma.
    """
    clipped = np.fmin(np.fmax(to_host(conf), 0.0), 1.0).astype(np.float64)  # fmax(NaN, 0) = 0
    if lengths is not None:
        clipped[np.arange(conf.shape[1])[None, :] >= to_host(lengths)[:, None]] = 0.0
    return np.multiply.accumulate(clipped, axis=1)


class BudgetScheduler:
    """Chooses verification lengths round by round.

    table:      step time by tokens in the batch.
    gamma:      drafts a round.
    mode:       "causal"    budget from an older round, allocation from the current one;
                "exact"     budget searched on the current round (point-mass drafts or greedy);
                "uniform"   one length for all requests, chosen from the older round;
                "threshold" verify while c_k >= threshold (c_k does not see draft k);
                "fixed"     `fixed_len` drafts of every request.
    draft_ms:   fixed time of a step besides the target's forward, by number of requests; belongs
                in the denominator: leaving it out under-verifies.
    correction: measured replacement for draft_ms and the table's context drift.
    min_gain:   verify everything unless the chosen budget promises at least this relative gain in
                tokens per millisecond over verifying everything (the price of a ragged batch).
    group:      choose one batch size for all ranks of a group, see `budget`.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(
        self,
        table: StepTable,
        gamma: int,
        mode: Mode = "causal",
        group: GroupReducer | None = None,
        *,
        draft_ms: Callable[[int], float] | float = 0.0,
        correction: RuntimeCorrection | None = None,
        min_gain: float = 0.0,
        threshold: float = 0.5,
        fixed_len: int | None = None,
    ) -> None:
        if mode not in MODES:
            raise ShapeError(f"mode is one of {', '.join(MODES)}; got {mode!r}")
        if gamma < 0 or (fixed_len is not None and not 0 <= fixed_len <= gamma):
            raise ShapeError(f"want 0 <= fixed_len <= gamma, got {fixed_len} and {gamma}")
        self.gamma, self.mode, self.group = gamma, mode, group
        self.threshold, self.min_gain = threshold, min_gain
        self.fixed_len = gamma if fixed_len is None else fixed_len
        self._draft_ms, self._correction = draft_ms, correction
        self.retime(table)

    def retime(self, table: StepTable) -> None:
        """Use another table from now on: measured again, or learned (`StepTimes.table`)."""
        self.table = table
        self._dense = table.dense(max(table.sizes[-1], 1))
        self._grid = np.asarray(table.sizes, dtype=np.int64)

    def budget(
        self,
        history: npt.NDArray[np.floating[Any]],
        lengths: Any | None = None,
        *,
        deterministic: bool = False,
    ) -> int:
        """How many drafts (anchors not counted) the next step verifies in total.

        history: float [R, gamma], conditional confidences c_k of the round before the one whose
                 drafts are being allocated, by request (`ConfidenceHistory.older`). In mode
                 "exact" the current round's instead.
        lengths: int [R] drafts each request can have verified, default gamma.
        deterministic: all drafts are point masses, or all requests are greedy.

        With a `group`, every rank must call this once a round, requests or not: the expected
        tokens of all ranks at each captured size are summed and every rank fills up to the size
        that maximises them over its cost, since the group waits for its fullest rank.
        Raises LosslessnessError for mode "exact" without `deterministic`.
        """
        history, lengths = self._check(history, lengths)
        R = history.shape[0]
        available = R * self.gamma if lengths is None else int(lengths.sum())
        if self.mode == "exact" and not deterministic:
            raise LosslessnessError(
                "mode='exact' searches the budget on the current confidences, which depend on the "
                "sampled drafts, and would change the law of the output: use mode='causal', or "
                "greedy or point-mass drafts with deterministic=True"
            )
        if self.mode == "threshold":
            return available
        if self.mode == "fixed":
            cap = np.full(R, self.gamma) if lengths is None else lengths
            return int(np.minimum(cap, self.fixed_len).sum())
        if R == 0 and self.group is None:
            return 0
        alive = survival(history, lengths)
        if self.mode == "uniform":
            return self._uniform(alive, available)
        if self.group is not None:
            return self._grouped(alive, available)
        return self._search(np.sort(alive, axis=None)[::-1], R, available)

    def _rate_cost(self, requests: int, top: int) -> Float:
        """Milliseconds of a whole round at batch sizes requests..top."""
        if top >= self._dense.size:
            self._dense = self.table.dense(top)
        cost = self._dense[requests : top + 1] + self._fixed_ms(requests)
        if self._correction is not None and self._correction.slope_ms > 0:
            cost = cost + self._correction.slope_ms * np.arange(requests, top + 1)
        return cost

    def _fixed_ms(self, requests: int) -> float:
        if self._correction is not None:
            return self._correction.fixed_ms(requests)
        return self._draft_ms(requests) if callable(self._draft_ms) else self._draft_ms

    def _search(self, ranked: Float, R: int, available: int) -> int:
        # global maximum, not the first descent: on a staircase the objective has many local ones
        ranked = ranked[:available]
        gain = np.empty(available + 1)
        gain[0] = R
        np.cumsum(ranked, out=gain[1:])
        gain[1:] += R
        rate = gain / self._rate_cost(R, R + available)
        best = int(rate.argmax())
        return self._or_all(best, available, float(rate[best]), float(rate[-1]))

    def _or_all(self, best: int, available: int, best_rate: float, all_rate: float) -> int:
        return available if best_rate < all_rate * (1.0 + self.min_gain) else best

    def _uniform(self, alive: Float, available: int) -> int:
        R, gamma = alive.shape
        gain = np.concatenate([[R], R + np.cumsum(alive.sum(axis=0))])
        rate = gain / self._rate_cost(R, R + R * gamma)[:: max(R, 1)][: gamma + 1]
        best = int(rate.argmax())
        return min(available, self._or_all(best, gamma, float(rate[best]), float(rate[-1])) * R)

    def _grouped(self, alive: Float, available: int) -> int:
        assert self.group is not None
        R = alive.shape[0]
        ranked = np.sort(alive, axis=None)[::-1][:available]
        gain = np.concatenate([[0.0], np.cumsum(ranked)]) + R
        fill = np.minimum(self._grid - R, available)
        mine = np.where(fill < 0, -np.inf, gain[np.maximum(fill, 0)])
        total = self.group.all_reduce_sum(np.append(mine, [1.0, self._fixed_ms(R)]))
        # every rank must divide by the same numbers: a fixed time that depends on the rank's own
        # number of requests is taken at the group's mean, which the reduction carries as well
        mean = float(total[-1]) / float(total[-2])
        rate = total[:-2] / (np.asarray(self.table.ms) + mean)
        if not np.isfinite(rate).any():
            return available
        best = int(np.where(np.isfinite(rate), rate, -np.inf).argmax())
        return int(max(fill[best], 0))

    def allocate(
        self, budget: int, conf: npt.NDArray[np.floating[Any]], lengths: Any | None = None
    ) -> Int:
        """Give `budget` drafts to the largest current survivals.

        conf: float [R, gamma] conditional confidences of the drafts to be verified; lengths:
        int [R], default gamma. Returns int64 [R], entries 0..lengths[r], sum <= budget; equality
        unless fewer drafts are available or the mode verifies fewer.
        """
        conf, lengths = self._check(conf, lengths)
        if not budget == budget // 1:
            raise ShapeError(f"want an integer budget, got {budget}")
        budget = max(int(budget), 0)
        R, gamma = conf.shape
        cap = np.full(R, gamma, dtype=np.int64) if lengths is None else lengths
        if self.mode == "fixed":
            return np.minimum(cap, self.fixed_len)
        if self.mode == "uniform":
            return np.minimum(cap, budget // max(R, 1))
        if self.mode == "threshold":
            confident = np.logical_and.accumulate(conf >= self.threshold, axis=1)
            cap = np.minimum(cap, confident.sum(axis=1))
        if budget >= int(cap.sum()):
            return cap
        if budget <= 0:
            return np.zeros(R, dtype=np.int64)
        return top_survivals(survival(conf), cap, budget)

    def _check(self, conf: Any, lengths: Any | None) -> tuple[npt.NDArray[Any], Int | None]:
        conf = to_host(conf)
        if conf.ndim != 2 or conf.shape[1] != self.gamma:
            raise ShapeError(f"want confidences [R, {self.gamma}], got {conf.shape}")
        if lengths is None:
            return conf, None
        lengths = to_host(lengths).astype(np.int64, copy=False)
        if lengths.shape != conf.shape[:1]:
            raise ShapeError(f"want lengths [{conf.shape[0]}], got {lengths.shape}")
        if lengths.size and (lengths.min() < 0 or lengths.max() > self.gamma):
            raise ShapeError(
                f"want lengths in 0..{self.gamma}, got {lengths.min()}..{lengths.max()}"
            )
        return conf, lengths


def top_survivals(alive: Float, cap: Int, budget: int) -> Int:
    """The `budget` largest entries of rows that do not increase, equal ones in flat order.

    alive: [R, gamma], non-increasing along gamma; cap: [R] entries of each row that take part;
    0 < budget < cap.sum(). Returns int64 [R].
    """
    R, gamma = alive.shape
    scores = np.where(np.arange(gamma)[None, :] < cap[:, None], alive, -1.0).ravel()
    bar = np.partition(scores, scores.size - budget)[scores.size - budget]
    above = scores > bar
    taken = above.reshape(R, gamma).sum(axis=1)
    tied = np.flatnonzero(scores == bar)[: budget - int(taken.sum())]
    return taken + np.bincount(tied // gamma, minlength=R)


class ConfidenceHistory:
    """Confidences of the last two rounds by slot, so that a budget can be made one round early.

    A slot is the engine's index of a running request. `record` is called when a round's outputs
    are processed; `older` answers what a budget may look at, whether or not a step is in flight.
    """

    def __init__(self, slots: int, gamma: int) -> None:
        self._rounds = np.zeros((2, slots, gamma))
        self._count = np.zeros(slots, dtype=np.int64)

    def record(self, slots: Any, conf: npt.NDArray[np.floating[Any]]) -> None:
        """Store the confidences of drafts just made. slots: int [R] distinct; conf: [R, gamma].

        Raises ShapeError for arguments that do not fit.
        """
        at = self._at(slots)
        conf = to_host(conf)
        if conf.shape != (at.size, self._rounds.shape[2]):
            raise ShapeError(
                f"want conf [{at.size}, {self._rounds.shape[2]}] for these slots, got {conf.shape}"
            )
        self._rounds[1, at] = self._rounds[0, at]
        self._rounds[0, at] = conf
        self._count[at] += 1

    def reset(self, slots: Any) -> None:
        """Forget: a slot was given to another request, or its request was preempted."""
        at = self._at(slots)
        self._rounds[:, at] = 0.0
        self._count[at] = 0

    def stop(self, slots: Any) -> None:
        """A stop token came out: no budget may be spent on these slots any more."""
        self._rounds[:, self._at(slots)] = 0.0

    def newest(self, slots: Any) -> Float:
        """float64 [R, gamma]; the latest recorded round: for allocation."""
        return self._rounds[0, self._at(slots)]

    def older(self, slots: Any, in_flight: Any = 0, has_drafts: Any = True) -> Float:
        """float64 [R, gamma]; what the budget of the next step may be computed from.

        in_flight: int [R] or int; steps scheduled but not processed (0 or 1) of each request. With
        0 the newest record belongs to the drafts being budgeted, so the one before it is used;
        with 1 the newest record is already one round older than those drafts.
        A request without such a record counts as certain (1) if it has drafts, else 0.
        """
        at = self._at(slots)
        pending = np.broadcast_to(np.asarray(in_flight), at.shape)
        known = self._count[at] >= np.where(pending == 0, 2, 1)
        found = np.where((pending == 0)[:, None], self._rounds[1, at], self._rounds[0, at])
        missing = np.broadcast_to(np.asarray(has_drafts), at.shape).astype(np.float64)
        return np.where(known[:, None], found, missing[:, None])

    def _at(self, slots: Any) -> Int:
        """int64 [R], checked: a negative index would silently be another request's."""
        at = to_host(slots)
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise ShapeError(f"want slots int [R], got {at.dtype} {at.shape}")
        if at.size and (at.min() < 0 or at.max() >= self._count.size):
            raise ShapeError(f"want slots in 0..{self._count.size - 1}, got {at.min()}..{at.max()}")
        return at.astype(np.int64)
