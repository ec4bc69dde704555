"""Temperatures make survivals honest; censoring rules keep them so."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_dspark import ShapeError, survival
from deepinfer_dspark.calibration import (
    Calibrator,
    expected_calibration_error,
    logit,
    ranking_auc,
    sigmoid,
)

GAMMA = 4


def rounds(n: int, temperature: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    z = rng.normal(1.0, 1.2, (n, 1)) + rng.normal(0.0, 0.5, (n, GAMMA))
    accepted = np.logical_and.accumulate(rng.random((n, GAMMA)) < sigmoid(z), axis=1).sum(axis=1)
    return sigmoid(z / temperature), accepted, np.full(n, GAMMA)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_fitting_finds_the_temperature_and_removes_the_error(temperature: float) -> None:
    made = Calibrator(GAMMA)
    found = made.fit(*rounds(40_000, temperature))
    assert found[0] == pytest.approx(1.0 / temperature, rel=0.15)
    fresh = rounds(40_000, temperature, seed=1)
    report = made.report(*fresh)
    raw = Calibrator(GAMMA).report(*fresh)
    assert all(p.ece < 0.015 for p in report.positions)
    assert abs(report.tau_error) < 0.03
    if temperature != 1.0:
        assert raw.positions[-1].ece > 0.03
    assert all(0.6 < p.auc < 1.0 for p in report.positions)
    # temperatures keep the order of rounds at the first position
    assert report.positions[0].auc == pytest.approx(raw.positions[0].auc, abs=1e-12)


def test_truncated_rounds_are_left_out_of_the_fit() -> None:
    conf, accepted, lengths = rounds(30_000, 1.0)
    made = Calibrator(GAMMA)
    clean = made.fit(conf, accepted, lengths).copy()
    short = np.full(accepted.size, 1)
    both = (
        np.concatenate([conf, conf]),
        np.concatenate([accepted, np.minimum(accepted, 1)]),
        np.concatenate([lengths, short]),
    )
    assert np.array_equal(Calibrator(GAMMA).fit(*both), clean)


def test_calibrated_survivals_do_not_increase() -> None:
    made = Calibrator(GAMMA)
    made.fit(*rounds(2000, 0.4))
    alive = survival(made.apply(np.random.default_rng(0).random((50, GAMMA))))
    assert (np.diff(alive, axis=1) <= 0).all()


def test_drift_is_followed_without_bias_from_truncation() -> None:
    made = Calibrator(GAMMA, drift_rate=0.2)
    for step in range(200):
        rng = np.random.default_rng(step)
        conf, accepted, _ = rounds(200, 1.0, seed=step)
        worse = sigmoid(logit(conf) + 1.0)  # promises too much by one logit
        lengths = rng.integers(0, GAMMA + 1, 200)
        made.update(worse, np.minimum(accepted, lengths), lengths)
    assert made.shift == pytest.approx(np.full(GAMMA, -1.0), abs=0.15)


def test_calibration_error_and_auc_by_hand() -> None:
    predicted, hit = np.array([0.92, 0.94, 0.11, 0.13]), np.array([1.0, 0.0, 0.0, 0.0])
    assert expected_calibration_error(predicted, hit) == pytest.approx((0.86 + 0.24) / 4)
    assert ranking_auc(np.array([0.9, 0.5, 0.5, 0.1]), np.array([1, 1, 0, 0])) == 0.875
    assert ranking_auc(np.array([0.5]), np.array([1])) == 0.5


def test_no_rounds_change_nothing() -> None:
    made = Calibrator(GAMMA)
    empty = np.zeros((0, GAMMA)), np.zeros(0, dtype=int), np.zeros(0, dtype=int)
    assert made.fit(*empty).tolist() == [1.0] * GAMMA
    assert made.report(*empty).tau_error == 0.0


def test_misuse_is_named() -> None:
    with pytest.raises(ShapeError):
        Calibrator(0)
    with pytest.raises(ShapeError, match=r"\[N, 4\]"):
        Calibrator(4).fit(np.ones((2, 3)), np.ones(2, dtype=int), np.ones(2, dtype=int))
