"""The command line: one clear line for an error, exit codes 0, 1 and 2, machine-readable output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_kernels import bench, cli, doctor, verify
from deepinfer_kernels.registry import Impl, default_registry, op_names
from deepinfer_kernels.testing import Mismatch


def test_doctor_lists_every_operator_and_says_what_is_not_built(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["op"] for row in found["devices"][0]["ops"]] == list(op_names())
    assert set(found["not_built"]) == {"ascend"}
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in op_names():
        assert f"\n{name} " in text
    assert "ascend: not built" in text


def test_doctor_fails_where_an_accelerator_has_only_the_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "present", lambda: ("cpu", "cuda"))
    with default_registry.use(backend="reference"):
        assert doctor.run(None, as_json=False) == 1
    assert "device cuda" in capsys.readouterr().out


def test_verify_passes_and_names_what_it_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--op", "mhc_post", "--cases", "2"]) == 0
    out = capsys.readouterr().out
    assert "cpu" in out
    assert "BROKEN" not in out


def test_verify_fails_on_a_wrong_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = default_registry.impls("swiglu")["reference"].fn

    def off_by_a_little(*args: object) -> object:
        return good(*args) * 1.001

    broken = {"triton": Impl("swiglu", "triton", off_by_a_little, _anywhere())}
    monkeypatch.setattr(default_registry, "impls", lambda name: broken)
    assert verify.run("cpu", ["swiglu"], cases=5, seed=0) == 1
    assert "BROKEN at swiglu[0] seed" in capsys.readouterr().out


def _anywhere():
    return default_registry.impls("rms_norm")["reference"].requires


def test_bench_reports_ratio_to_floor_and_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "CEILING_BYTES", 1 << 16)
    out = tmp_path / "result.json"
    command = ["bench", "--op", "mhc_collapse", "--seconds", "0.001", "--out", str(out)]
    assert cli.main(command) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert {row["backend"] for row in result["rows"]} >= {"reference"}
    assert all(
        row["p95_us"] >= row["median_us"] >= row["best_us"] > 0 and row["floor_us"] > 0
        for row in result["rows"]
    )
    assert all(row["bytes"] < bench.LARGE_FROM_BYTES for row in result["rows"])
    assert "of floor" in capsys.readouterr().out


def test_bench_refuses_to_time_a_wrong_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CEILING_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "check_impl", lambda *_: Mismatch(2.0, 1.0, "here"))
    assert cli.main(["bench", "--op", "rope", "--seconds", "0.001"]) == 2
    assert "is wrong: here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--op", "nope"], "no operator 'nope'; there are: add_rms_norm"),
        (["doctor", "--device", "npu"], "no device of type 'npu' here; present: cpu"),
        (["bench", "--seconds", "0"], "wants seconds above 0"),
        (["verify", "--cases", "none"], "wants a whole number from 1, got 'none'"),
        ([], "arguments are required: command"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_unwritable_result_file_is_one_line_and_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CEILING_BYTES", 1 << 16)
    target = str(tmp_path / "absent" / "result.json")
    assert cli.main(["bench", "--op", "rope", "--seconds", "0.001", "--out", target]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_help_and_version_come_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from deepinfer_kernels import cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "deepinfer-kernels 0.2.0\n"


def test_reason_for_absent_native_forms_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "unavailable", lambda: "is not built")
    assert doctor.run("cpu", as_json=False) == 0
    assert "not usable: it is not built" in capsys.readouterr().out
