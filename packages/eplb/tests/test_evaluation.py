"""Balance figures mean what they say, the floor included."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_eplb import ShapeError, evaluate
from deepinfer_eplb.bench.loads import KINDS, generate
from deepinfer_eplb.evaluation import expected_max_normal, noise_floor


def test_balance_is_busiest_over_mean_by_hand() -> None:
    loads = np.array([[[6.0, 2.0, 4.0]]])  # ranks {0, 1} and {0, 2}: 3 + 2 and 3 + 4
    result = evaluate(loads, np.array([[0, 1, 0, 2]]), 2)
    assert pytest.approx(7 / 6) == result.B
    assert pytest.approx(6) == result.M


def test_totals_hide_what_steps_show() -> None:
    steps = np.array([[[10, 0, 0, 10]], [[0, 10, 10, 0]]])
    placement = np.array([[0, 3, 1, 2]])
    assert evaluate(steps.sum(axis=0, keepdims=True), placement, 2).B == 1.0
    assert evaluate(steps, placement, 2).B == 2.0


def test_floor_is_what_balanced_poisson_ranks_show() -> None:
    rng = np.random.default_rng(0)
    loads = rng.poisson(400.0, size=(400, 1, 32))
    result = evaluate(loads, np.arange(32)[None], 32)
    assert result.floor == pytest.approx(result.B, abs=0.01)
    assert abs(result.excess) < 0.01


@pytest.mark.parametrize(("n", "z"), [(1, 0.0), (2, 0.5642), (8, 1.4236), (64, 2.3437)])
def test_expected_maximum_of_normals_has_the_tabulated_values(n: int, z: float) -> None:
    assert expected_max_normal(n) == pytest.approx(z, abs=2e-3)


def test_an_idle_window_counts_as_balanced() -> None:
    assert evaluate(np.zeros((3, 1, 4)), np.arange(4)[None], 2).B == 1.0
    assert noise_floor(8, 0.0) == 1.0


def test_generated_loads_are_skewed_noisy_and_reproducible() -> None:
    for kind in KINDS:
        a = generate(kind, 3, steps=20, layers=2, experts=64, tokens=2000)
        b = generate(kind, 3, steps=20, layers=2, experts=64, tokens=2000)
        assert np.array_equal(a.counts, b.counts)
        mean = a.expected.mean(axis=0)
        assert 1.5 < (mean.max(axis=1) / mean.mean(axis=1)).max() < 20
        relative = a.counts.sum() / a.expected.sum()
        assert relative == pytest.approx(1.0, abs=0.02)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ShapeError, match="2 layers"):
        evaluate(np.ones((1, 2, 4)), np.arange(4)[None], 2)
    with pytest.raises(ShapeError, match="'even' or 'waterfill'"):
        evaluate(np.ones((1, 1, 4)), np.arange(4)[None], 2, dispatch="lp")
