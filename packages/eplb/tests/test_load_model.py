"""The load model tells change from counting noise, and weighs the old placement against it."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_eplb import evaluate, plan
from deepinfer_eplb.bench.loads import generate
from deepinfer_eplb.planning.load_model import fit, trust_old
from deepinfer_eplb.planning.scenarios import blocks, moving_excess, scale


def test_counting_noise_alone_has_no_direction() -> None:
    for seed in range(6):
        window = generate("static", seed, steps=100, layers=6).counts.astype(float)
        model = fit(window, 64)
        assert model.components.shape[1] == 1
        assert not model.moving


def test_directions_explain_what_happened_better_than_the_recorded_blocks_do() -> None:
    trace = generate("drift", 2, steps=100, layers=6)
    model = fit(trace.counts.astype(float), 64)
    assert model.moving
    assert 4 < model.components.shape[1] <= 17
    truth = scale(blocks(trace.expected, 100), 64)
    seen = scale(blocks(trace.counts.astype(float), 100), 64)
    told = model.components[:, 0][None] + np.tensordot(
        model.path, model.components[:, 1:].transpose(1, 0, 2), 1
    )
    assert np.sqrt(((told - truth) ** 2).mean()) < 0.5 * np.sqrt(((seen - truth) ** 2).mean())


def test_variance_of_the_model_is_that_of_the_loads() -> None:
    trace = generate("drift", 4, steps=100, layers=6)
    model = fit(trace.counts.astype(float), 64)
    told = (model.components[:, 1:] ** 2).sum(axis=1).sum()
    true = scale(trace.expected, 64).var(axis=0).sum()
    assert told == pytest.approx(true, rel=0.15)


def test_expectations_without_noise_count_as_such() -> None:
    trace = generate("skew", 4, steps=100, layers=4)
    assert fit(trace.expected, 64).noise.sum() < 0.01 * fit(trace.counts * 1.0, 64).noise.sum()


def test_loads_noisier_than_counts_are_noticed() -> None:
    rng = np.random.default_rng(0)
    window = rng.negative_binomial(50, 50 / (50 + 200.0), (100, 4, 96)).astype(float)
    ratio = fit(window, 8).noise.sum() / fit(rng.poisson(200.0, window.shape) * 1.0, 8).noise.sum()
    assert ratio == pytest.approx(1 + 200 / 50, rel=0.2)


def test_the_old_placement_is_believed_where_loads_stand_still() -> None:
    trace = generate("static", 5, steps=200, layers=4)
    old = plan(trace.counts[:100], 64, 448).phy2log
    model = fit(trace.counts[100:].astype(float), 64)
    truth = scale(trace.expected[0], 64)
    n = np.stack([np.bincount(row, minlength=384) for row in old])
    raw, told = 0.0, 0.0
    for layer in range(4):
        trusted = trust_old(model.components[layer], model.noise[layer], old[layer], 64)
        ranks = old[layer].reshape(64, 7)
        for c, add in ((model.components[layer], 0), (trusted, 1)):
            error = ((c[0] - truth[layer]) / n[layer])[ranks].sum(axis=1)
            raw, told = (
                (raw + (error**2).sum(), told) if add == 0 else (raw, told + (error**2).sum())
            )
    assert told < 0.7 * raw


def test_an_old_placement_that_no_longer_fits_is_not_believed() -> None:
    trace = generate("skew", 5, steps=100, layers=1)
    model = fit(trace.counts.astype(float), 64)
    linear = np.arange(448) % 384
    told = trust_old(model.components[0], model.noise[0], linear, 64)
    assert np.abs(told[0] / model.components[0, 0] - 1).max() < 0.002


def test_moving_loads_are_told_from_slowly_walking_ones() -> None:
    for kind, low, high in (("mild", 0.0, 0.045), ("skew", 0.0, 0.045), ("drift", 0.07, 1.0)):
        window = generate(kind, 6, steps=100, layers=8).counts.astype(float)
        assert low <= moving_excess(window) <= high


def test_a_handful_of_steps_is_enough_to_plan() -> None:
    trace = generate("skew", 7, steps=40, layers=2)
    for steps in (1, 2, 3, 5, 9):
        made = plan(trace.counts[:steps], 64, 448)
        assert evaluate(trace.expected[20:], made.phy2log, 64).B < 1.3


def test_an_idle_layer_does_not_blind_the_others() -> None:
    window = generate("drift", 2, steps=100, layers=6).counts.astype(float)
    alone = fit(window, 64).components.shape[1]
    window[:, 3] = 0.0
    window[10:14, 4] = 0.0
    model = fit(window, 64)
    assert model.components.shape[1] >= alone - 2 > 3
    assert np.allclose(model.components[3, 0], 64 / 384)
    assert np.allclose(model.components[3, 1:], 0.0)


def test_what_noise_adds_to_a_weak_direction_is_taken_off() -> None:
    told = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        turn = np.tile([1.0, -1.0], 25)[:, None, None] * rng.choice([-1.0, 1.0], (1, 4, 96))
        model = fit(rng.poisson(200.0 * (1.0 + 0.015 * turn)) * 1.0, 96)
        assert model.components.shape[1] == 2
        told.append(float((model.components[:, 1] ** 2).mean()) / 0.015**2)
    assert np.mean(told) == pytest.approx(1.0, abs=0.15)
