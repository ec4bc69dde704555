"""The simulator has the published shape, and the command shows it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from deepinfer_dspark.cli import main
from deepinfer_dspark.sim import (
    SEPARATING,
    Acceptance,
    Machine,
    ReplayStream,
    fit_machine,
    simulate,
    simulate_group,
)


def test_fitted_on_the_ends_the_curve_between_has_the_published_shape() -> None:
    machine = fit_machine((16, -0.015), (96, 0.11), steps=300)
    at = {R: simulate(R, machine=machine, steps=900, seed=1) for R in (16, 32, 48, 64, 96)}
    assert at[16].gain < 0 < at[32].gain
    assert 0.035 < at[48].gain < 0.075
    assert 0.05 < at[64].gain < 0.08
    assert 0.27 < 1 - at[64].rows < 0.33
    assert at[96].gain == pytest.approx(0.11, abs=0.02)
    # the default confidences cannot explain an unchanged accepted length: said, not hidden
    assert at[64].length_dynamic < at[64].length_fixed * 0.97


def test_better_separating_confidences_keep_the_accepted_length() -> None:
    machine = fit_machine((16, -0.015), (96, 0.11), steps=150, model=SEPARATING)
    o = simulate(64, machine=machine, model=SEPARATING, steps=500, seed=2)
    assert 0.27 < 1 - o.rows < 0.33
    assert 0.04 < o.gain < 0.07
    assert o.length_dynamic > o.length_fixed * 0.97


def test_seven_drafts_show_the_signs_of_the_second_published_curve() -> None:
    """Adaptive against fixed at 4..256: negative up to 32, positive from 64."""
    model = Acceptance(mean=0.55)
    machine = fit_machine(
        (16, -0.06), (128, 0.18), gamma=7, model=model, steps=100, per_token_range=(0.002, 0.3)
    )
    gains = {
        R: simulate(R, gamma=7, machine=machine, model=model, steps=200).gain
        for R in (4, 8, 16, 32, 64, 128, 256)
    }
    assert all(gains[R] < 0 for R in (4, 8, 16, 32))
    assert all(gains[R] > 0 for R in (64, 128, 256))
    assert gains[256] > gains[128] > gains[64]


def test_min_gain_keeps_the_loss_of_small_batches_small() -> None:
    machine = Machine(ragged_overhead=0.03)
    assert simulate(16, machine=machine, steps=400).gain < -0.005
    assert simulate(16, machine=machine, steps=400, min_gain=0.03).gain > -0.005


def test_old_estimates_cost_little() -> None:
    fresh = simulate(96, stale=False, steps=500).gain
    assert simulate(96, steps=500).gain > fresh - 0.01


def test_noisy_or_miscalibrated_confidences_cost_something() -> None:
    clean = simulate(96, steps=500).gain
    assert simulate(96, steps=500, model=Acceptance(conf_noise=1.5)).gain < clean - 0.005
    assert simulate(96, steps=500, model=Acceptance(miscalibration=2.5)).gain < clean - 0.002


def test_group_wide_budgets_beat_each_rank_alone_when_ranks_wait_for_each_other() -> None:
    for spread in (0.0, 6.0):
        o = simulate_group(ranks=8, requests=48, spread=spread, steps=25)
        assert o.group > o.independent + 0.02


def test_recorded_rounds_can_be_replayed() -> None:
    rng = np.random.default_rng(0)
    conf = rng.random((500, 5))
    accepted = np.logical_and.accumulate(rng.random((500, 5)) < conf, axis=1).sum(axis=1)
    o = simulate(32, steps=200, stream=ReplayStream(conf, accepted, 32, 1))
    assert 0 < o.drafts < 1
    assert o.length_fixed == pytest.approx(1 + accepted.mean(), abs=0.05)


def test_the_command_prints_writes_and_draws(tmp_path, capsys) -> None:
    rows, picture = tmp_path / "rows.json", tmp_path / "gain.svg"
    arguments = ["sim", "--steps", "60", "--requests", "16", "96", "--json", str(rows)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "rows saved" in out
    assert "length lost" in out
    assert set(json.loads(rows.read_text())) >= {"default", "separating", "published"}
    assert main(["plot", str(rows), str(picture)]) == 0
    root = ET.fromstring(picture.read_text())
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


def test_errors_are_one_line(tmp_path, capsys) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    for arguments in (
        ["plot", str(bad), str(tmp_path / "x.svg")],
        ["plot", "/nonexistent", "x"],
        ["sim", "--steps", "0"],
    ):
        assert main(arguments) == 1
        err = capsys.readouterr().err
        assert err.startswith("deepinfer-dspark: ")
        assert err.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        main(["draw"])
    assert stop.value.code == 2
