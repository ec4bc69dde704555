"""Confidences made to mean what they say: survival estimates against observed survival.

Sequential temperature scaling: for k = 1..gamma choose T_k so that a_k = c_1 * ... * c_k has the
least expected calibration error against "drafts 1..k were all accepted", earlier T fixed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import to_host
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.verification import VerifyResult

Float = npt.NDArray[np.float64]
BINS = 20
GRID = np.exp(np.linspace(np.log(0.25), np.log(4.0), 97))


@dataclass(frozen=True, slots=True)
class PositionReport:
    """Calibration of one position: error, Brier score, ranking (AUC), mean predicted, observed."""

    position: int
    rounds: int
    ece: float
    brier: float
    auc: float
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """positions: one entry each; tau_error: predicted minus observed mean accepted drafts."""

    positions: tuple[PositionReport, ...]
    tau_error: float


def logit(p: npt.ArrayLike) -> Float:
    """log(p / (1 - p)) with p kept away from 0 and 1; NaN counts as 0, as in `survival`."""
    clipped = np.fmin(np.fmax(np.asarray(p, dtype=np.float64), 1e-9), 1 - 1e-9)
    return np.log(clipped) - np.log1p(-clipped)


def sigmoid(z: npt.ArrayLike) -> Float:
    """1 / (1 + exp(-z)), stable at both ends."""
    x = np.asarray(z, dtype=np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def expected_calibration_error(predicted: Float, observed: Float, bins: int = BINS) -> float:
    """Mean over equal-width bins of |mean predicted - mean observed|, weighted by bin size."""
    if predicted.size == 0:
        return 0.0
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=predicted - observed, minlength=bins)
    return float(np.abs(gap).sum() / predicted.size)


def ranking_auc(score: Float, hit: Float) -> float:
    """Chance that a surviving round scores above one that did not (ties count half)."""
    positives = int(hit.sum())
    negatives = hit.size - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    wins = ranks[hit > 0].sum() - positives * (positives + 1) / 2.0
    return float(wins / (positives * negatives))


class Calibrator:
    """Temperatures by position, and a slow correction of what drifts afterwards.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(self, gamma: int, *, drift_rate: float = 0.0) -> None:
        if gamma < 1 or not 0.0 <= drift_rate < 1.0:
            raise ShapeError(f"want gamma >= 1 and 0 <= drift_rate < 1, got {gamma}, {drift_rate}")
        self.temperatures: Float = np.ones(gamma)
        self.shift: Float = np.zeros(gamma)
        self._rate = drift_rate

    def fit(
        self,
        conf: npt.NDArray[np.floating[Any]],
        accepted: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.integer[Any]],
    ) -> Float:
        """Fit temperatures from judged rounds; returns them, float64 [gamma].

        conf: float [N, gamma] as the drafter gave it; accepted: int [N] kept drafts; lengths: int
        [N] drafts verified. Only rounds with every draft verified are used: in shorter ones
        survival beyond the cut is unknown, and leaving it out would bias the rate upwards.
        """
        z, survived = self._full_rounds(conf, accepted, lengths)
        before = np.ones(z.shape[0])
        for k in range(self.temperatures.size):
            if z.shape[0]:
                errors = [
                    expected_calibration_error(before * sigmoid(z[:, k] / t), survived[:, k])
                    for t in GRID
                ]
                best = float(np.min(errors))
                # many temperatures can tie on few rounds: take the one nearest to doing nothing
                near = np.flatnonzero(np.asarray(errors) <= best + 1e-12)
                self.temperatures[k] = GRID[near[np.abs(np.log(GRID[near])).argmin()]]
            before = before * sigmoid(z[:, k] / self.temperatures[k])
        return self.temperatures

    def apply(self, conf: npt.NDArray[np.floating[Any]]) -> Float:
        """Calibrated conditional confidences, float64 of the shape of `conf`; their running
        products do not increase, so allocation by survival stays lossless."""
        conf = to_host(conf)
        if conf.ndim == 0 or conf.shape[-1] != self.temperatures.size:
            raise ShapeError(f"want conf [..., {self.temperatures.size}], got {conf.shape}")
        return sigmoid(logit(conf) / self.temperatures + self.shift)

    def update(
        self,
        conf: npt.NDArray[np.floating[Any]],
        accepted: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.integer[Any]],
    ) -> None:
        """Follow drift: nudge each position's logit towards what was observed.

        Uses every *reached* position (all before it accepted), whose conditional outcome is known
        whenever it was verified, so truncated rounds do not bias it. conf: as given to `apply`.
        """
        if self._rate == 0.0:
            return
        conf, accepted, lengths = self._checked(conf, accepted, lengths)
        k = np.arange(self.temperatures.size)[None, :]
        judged = (k <= accepted[:, None]) & (k < lengths[:, None])
        hit = k < accepted[:, None]
        gap = np.where(judged, hit - self.apply(conf), 0.0).sum(axis=0)
        self.shift += self._rate * gap / np.maximum(judged.sum(axis=0), 1)

    def report(
        self,
        conf: npt.NDArray[np.floating[Any]],
        accepted: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.integer[Any]],
    ) -> CalibrationReport:
        """How well the calibrated survivals match rounds that were verified in full."""
        z, survived = self._full_rounds(conf, accepted, lengths)
        alive = np.multiply.accumulate(sigmoid(z / self.temperatures + self.shift), axis=1)
        n = z.shape[0]
        rows = tuple(
            PositionReport(
                position=k + 1,
                rounds=n,
                ece=expected_calibration_error(alive[:, k], survived[:, k]),
                brier=float(np.mean((alive[:, k] - survived[:, k]) ** 2)) if n else 0.0,
                auc=ranking_auc(alive[:, k], survived[:, k]),
                predicted=float(alive[:, k].mean()) if n else 0.0,
                observed=float(survived[:, k].mean()) if n else 0.0,
            )
            for k in range(self.temperatures.size)
        )
        return CalibrationReport(rows, sum(r.predicted - r.observed for r in rows))

    def _full_rounds(
        self,
        conf: npt.NDArray[np.floating[Any]],
        accepted: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.integer[Any]],
    ) -> tuple[Float, Float]:
        gamma = self.temperatures.size
        conf, accepted, lengths = self._checked(conf, accepted, lengths)
        full = lengths == gamma
        survived = np.arange(gamma)[None, :] < accepted[full][:, None]
        return logit(conf[full]), survived.astype(np.float64)

    def _checked(
        self, conf: Any, accepted: Any, lengths: Any
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        gamma = self.temperatures.size
        conf, accepted, lengths = to_host(conf), to_host(accepted), to_host(lengths)
        N = conf.shape[:1]
        if conf.shape != (*N, gamma) or accepted.shape != N or lengths.shape != N:
            raise ShapeError(
                f"want conf [N, {gamma}], accepted [N] and lengths [N], got {conf.shape}, "
                f"{accepted.shape} and {lengths.shape}"
            )
        return conf, accepted, lengths


class ProxyConfidence:
    """Confidences for drafters without a head: the top probability of the draft's own law,
    shifted by position towards what was accepted.

    The law of draft k is known before draft k is drawn, so acting on it stays lossless.
    """

    def __init__(self, gamma: int, *, drift_rate: float = 0.1) -> None:
        self._calibrator = Calibrator(gamma, drift_rate=drift_rate)
        self._raw: dict[Hashable, Float] = {}

    def of(self, request_ids: Sequence[Hashable], peak: Any) -> Float:
        """float64 [R, gamma] from the top probabilities [R, gamma] of the draft laws."""
        raw = to_host(peak).astype(np.float64)
        self._raw.update(zip(request_ids, raw, strict=True))
        return self._calibrator.apply(raw)

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Learn from the round that judged the drafts `of` was last asked about."""
        known = [i for i, r in enumerate(request_ids) if r in self._raw]
        if known:
            judged = result.judged[known]
            accepted = np.minimum(result.n_accepted[known], judged)
            raw = np.stack([self._raw[request_ids[i]] for i in known])
            self._calibrator.update(raw, accepted, judged)

    def reset(self, request_id: Hashable) -> None:
        """Forget a request."""
        self._raw.pop(request_id, None)
