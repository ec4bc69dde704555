"""Temperatures make survivals honest; censoring rules keep them so."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_dspark import ShapeError, VerifyResult, survival
from deepinfer_dspark.calibration import (
    Calibrator,
    ProxyConfidence,
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


def outcome(accepted: list[int], verified: int) -> VerifyResult:
    """A round in which the first drafts were kept and the next was rejected."""
    n, R = np.array(accepted), len(accepted)
    k = np.arange(3)[None, :]
    judged = np.minimum(n + 1, verified)
    none = np.zeros(R, dtype=bool)
    return VerifyResult(
        np.zeros(0, dtype=np.int64), np.zeros(R + 1, dtype=np.int64), n, n, 
        np.where(k < judged[:, None], k < n[:, None], np.nan), none, none, none, none,
        np.full(R, verified),
    )  # fmt: skip


def test_proxy_confidences_move_to_what_is_accepted_by_position() -> None:
    proxy = ProxyConfidence(3)
    peak = np.full((2, 3), 0.5)
    assert np.allclose(proxy.of(["a", "b"], peak), 0.5)
    for _ in range(300):  # the first draft is always kept, the second never, the third not judged
        proxy.of(["a", "b"], peak)
        proxy.observe(["b", "a"], outcome([1, 1], 3))
    conf = proxy.of(["a", "b"], peak)
    assert (conf[:, 0] > 0.9).all()
    assert (conf[:, 1] < 0.1).all()
    assert np.allclose(conf[:, 2], 0.5)
    proxy.reset("a")
    proxy.observe(["a"], outcome([0], 3))  # unknown by now: nothing to learn from
    assert np.array_equal(proxy.of(["a", "b"], peak), conf)


def test_proxy_confidences_keep_the_order_of_the_drafts_own_certainty() -> None:
    proxy = ProxyConfidence(3)
    proxy.of(["a"], np.array([[0.9, 0.2, 0.7]]))
    proxy.observe(["a"], outcome([1], 2))
    conf = proxy.of(["a", "b"], np.array([[0.9] * 3, [0.3] * 3]))
    assert (conf[0] > conf[1]).all()
