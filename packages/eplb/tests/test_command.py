"""The command prints, draws and fails politely; the live example stays bit-identical."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from deepinfer_eplb.cli import main


def test_bench_prints_every_policy_with_its_floor(capsys, tmp_path) -> None:
    code = main(
        ["bench", "--kinds", "skew", "--layers", "2", "--experts", "32", "--ranks", "8", "--slots",
         "40", "--repeats", "1", "--json", str(tmp_path / "rows.json")]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    for policy in ("linear", "totals", "per-step", "keep", "plan, from old", "plan, full"):
        assert policy in out
    assert "floor" in out
    assert (tmp_path / "rows.json").read_text().count('"policy"') == 6


def test_draw_writes_a_picture_of_rank_loads_before_and_after(capsys, tmp_path) -> None:
    loads = tmp_path / "loads.npy"
    np.save(loads, np.random.default_rng(0).poisson([[[90, 10, 20, 30, 5, 45]]], (40, 2, 6)))
    target = tmp_path / "loads.svg"
    assert main(["draw", str(target), "--loads", str(loads), "--ranks", "4", "--slots", "8"]) == 0
    root = ET.fromstring(target.read_text())
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if len(r)]
    assert len(bars) == 8
    assert "B " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["draw", "x.svg", "--loads", "/nonexistent.npy"], "No such file"),
        (["draw", "x.svg", "--ranks", "63"], "multiple of num_gpus"),
        (["draw", "x.svg", "--layer", "99"], "--layer wants"),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments, says, capsys) -> None:
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_pickled_array_is_refused(tmp_path, capsys) -> None:
    evil = tmp_path / "evil.npy"
    np.save(evil, np.array([{}], dtype=object), allow_pickle=True)
    assert main(["draw", "x.svg", "--loads", str(evil)]) == 1
    assert "not a plain .npy" in capsys.readouterr().err


def test_without_torch_the_live_example_names_the_extra(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["demo"]) == 1
    assert "deepinfer-eplb[torch]" in capsys.readouterr().err


def test_usage_errors_exit_with_two() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--kinds", "nonsense"])
    assert stop.value.code == 2


def test_four_gloo_processes_rearrange_live_and_stay_bit_identical(capfd) -> None:
    pytest.importorskip("torch", reason="the gloo example needs torch")
    import subprocess

    run = subprocess.run(
        [sys.executable, "-m", "deepinfer_eplb.cli", "demo", "--steps", "45"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "differs from one process, over all ranks: 0" in run.stdout
    assert "4 gloo processes" in run.stdout


def test_a_group_serves_on_while_one_joins_one_is_killed_and_one_leaves() -> None:
    pytest.importorskip("torch", reason="the gloo example needs torch")
    import subprocess

    run = subprocess.run(
        [sys.executable, "-m", "deepinfer_eplb.cli", "demo", "--elastic", "--steps", "6"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for line in ("process 3 joins: 4 ranks", "process 1 is killed: 3 ranks", "leaves: 2 ranks"):
        assert line in run.stdout
    # two processes serve all 24 steps, one from the 7th to the 18th; the killed one reports nothing
    assert "over all ranks: 60; different: 0" in run.stdout
