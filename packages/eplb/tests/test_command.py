"""The command prints, draws and fails politely; the live example stays bit-identical."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from deepinfer_eplb import __version__
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


def test_bench_on_recorded_loads_compares_excesses(capsys, tmp_path) -> None:
    loads = tmp_path / "recorded.npy"
    np.save(loads, np.random.default_rng(0).poisson([[[90, 10, 20, 30, 5, 45]]], (60, 2, 6)))
    rows = tmp_path / "rows.json"
    arguments = ["bench", "--loads", str(loads), "--ranks", "4", "--slots", "8", "--repeats", "1"]
    assert main([*arguments, "--json", str(rows)]) == 0
    out = capsys.readouterr().out
    assert "2 layers x 6 experts, 4 ranks, 8 slots" in out
    assert "recorded" in out
    held = json.loads(rows.read_text())
    assert len(held) == 6
    assert all(row["sys"] is None and row["B"] >= 1 for row in held)
    np.save(loads, np.ones((2, 2, 6)))
    assert main(arguments) == 1
    assert "at least 3 recorded steps" in capsys.readouterr().err


def test_plan_writes_what_sglang_and_python_read(capsys, tmp_path) -> None:
    loads, out = tmp_path / "loads.npy", tmp_path / "init.json"
    np.save(loads, np.random.default_rng(0).poisson([[[90, 10, 20, 30, 5, 45]]], (40, 2, 6)))
    common = ["plan", "--loads", str(loads), "--ranks", "4", "--slots", "8"]
    assert main([*common, "--output", str(out), "--first-moe-layer", "1"]) == 0
    first = np.array(json.loads(out.read_text())["physical_to_logical_map"])
    assert first.shape == (3, 8)  # layer 0 of the model has no experts
    assert "busiest over mean" in capsys.readouterr().out
    np.save(tmp_path / "old.npy", first[1:])
    arguments = ["--old", str(tmp_path / "old.npy"), "--output", str(tmp_path / "next.npz")]
    assert main([*common, *arguments]) == 0
    text = capsys.readouterr().out
    assert "the old placement" in text
    with np.load(tmp_path / "next.npz") as held:
        assert sorted(held) == ["log2phy", "logcnt", "phy2log"]
        assert held["phy2log"].shape == (2, 8)
    shrink = ["plan", "--loads", str(loads), "--ranks", "3", "--slots", "6", "--old-ranks", "4"]
    assert main([*shrink, *arguments]) == 0


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_draw_writes_a_picture_of_rank_loads_before_and_after(ending, capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    loads = tmp_path / "loads.npy"
    np.save(loads, np.random.default_rng(0).poisson([[[90, 10, 20, 30, 5, 45]]], (40, 2, 6)))
    target = tmp_path / f"loads.{ending}"
    arguments = ["draw", str(target), "--loads", str(loads), "--ranks", "4", "--slots", "8"]
    assert main(arguments) == 0
    drawn = target.read_bytes()
    assert drawn[:4] == b"\x89PNG" if ending == "png" else ET.fromstring(drawn).tag.endswith("svg")
    assert "B " in capsys.readouterr().out
    assert main(arguments) == 0
    assert target.read_bytes() == drawn  # the same input, the same picture


def test_no_text_of_a_picture_lies_on_another(tmp_path, monkeypatch) -> None:
    """Titles, ticks, labels, legend and caption, for few ranks and for many."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from deepinfer_eplb.bench.plots import draw_loads

    figures: list = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    for ranks in (1, 4, 64, 320):
        loads = np.random.default_rng(ranks).gamma(9, 1 / 9, ranks)
        titles = ("experts in order: B = 1.513", "planned: B = 1.075")
        caption = "skew, seed 1: mean load of each rank on unseen steps, layer 0; noise floor 1.058"
        draw_loads(tmp_path / "x.svg", [(t, loads) for t in titles], caption)
        figure = figures.pop()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = [figure._supxlabel, *figure.legends]
        for axis in figure.axes:
            texts += [axis._left_title, axis.xaxis.label, axis.yaxis.label]
            low, high = axis.get_ylim()
            texts += [
                tick.label1
                for tick in axis.yaxis.get_major_ticks()
                if low <= tick.get_loc() <= high
            ]
        ticks = figure.axes[-1].xaxis.get_major_ticks()
        low, high = figure.axes[-1].get_xlim()
        texts += [t.label1 for t in ticks if low <= t.get_loc() <= high]
        renderer = canvas.get_renderer()
        boxes = [t.get_window_extent(renderer) for t in texts]
        boxes = [b for b in boxes if b.width > 1 and b.height > 1]
        assert len(boxes) > 8
        for i, a in enumerate(boxes):
            assert figure.bbox.x0 <= a.x0 <= a.x1 <= figure.bbox.x1 + 1, (ranks, a)
            assert figure.bbox.y0 <= a.y0 <= a.y1 <= figure.bbox.y1 + 1, (ranks, a)
            for b in boxes[:i]:
                assert not a.overlaps(b), (ranks, a, b)


def test_the_version_is_printed(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"deepinfer-eplb {__version__}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["draw", "x.svg", "--loads", "/nonexistent.npy"], "No such file"),
        (["draw", "x.svg", "--ranks", "63"], "multiple of num_gpus"),
        (["draw", "x.svg", "--layer", "99"], "--layer wants"),
        (["draw", "x.jpeg"], "end in .svg"),
        (
            [
                "plan",
                "--loads",
                "/nonexistent.npy",
                "--ranks",
                "2",
                "--slots",
                "4",
                "--output",
                "x",
            ],
            "No such file",
        ),
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
    assert "./packages/eplb[torch]" in capsys.readouterr().err


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
