"""Ahead-of-time results: what counts as worse, and (with triton) two compilations."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deepinfer_kernels import cli
from deepinfer_kernels.errors import ConfigError
from deepinfer_kernels.triton_support import compare_aot, interp

if TYPE_CHECKING:
    from deepinfer_kernels.triton_support.aot import Compiled

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or interp.active(),
    reason="needs triton, without TRITON_INTERPRET: nox -s kernels_aot",
)
BEFORE: dict[str, Any] = {
    "kernel": "k",
    "variant": "v",
    "target": "sm80",
    "registers": 100,
    "stack": 0,
    "shared": 10_000,
    "tmem": 0,
    "families": ["mma"],
    "faults": [],
}
EARLIER = {("k", "v", "sm80"): BEFORE}


def test_without_triton_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_aot, "find_spec", lambda name: None)
    assert cli.main(["aot", "--op", "rms_norm"]) == 2
    assert "pip install './packages/kernels[triton]'" in capsys.readouterr().err


def test_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for text in ("[]", "{", '{"rows": [{}]}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="is no table of"):
            compare_aot._read(str(path))


def test_recorded_table_keeps_every_limit_of_its_targets() -> None:
    path = Path(__file__).parents[1] / "benches" / "results" / "aot.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert not [row["kernel"] for row in rows if row["faults"]]
    everywhere = {"sm80", "sm90a", "sm100a", "sm120a"}
    targets: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        targets.setdefault((row["kernel"], row["variant"]), set()).add(row["target"])
    for (kernel, variant), found in targets.items():
        assert found == ({"sm100a"} if "_sm100_" in kernel else everywhere), (kernel, variant)
    products = {row["kernel"]: row["families"] for row in rows if row["target"] == "sm80"}
    for kernel in ("mla_sparse_kernel", "mla_decode_sparse_kernel", "gqa_attention_kernel"):
        assert "mma" in products[kernel], f"{kernel} does not reach the matrix units"


@pytest.mark.parametrize(
    ("kernel", "target", "wanted"),
    [
        ("mla_decode_sparse_sm100_kernel", "sm100a", {"tcgen05", "tma"}),
        ("grouped_mx_linear_sm100_kernel", "sm100a", {"mxf8f6f4", "tma"}),
        ("grouped_mx_linear_kernel", "sm90a", {"wgmma"}),
        ("grouped_mx_linear_kernel", "sm80", {"mma"}),
    ],
)
def test_recorded_table_holds_the_instructions_a_form_was_written_for(
    kernel: str, target: str, wanted: set[str]
) -> None:
    path = Path(__file__).parents[1] / "benches" / "results" / "aot.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    mine = [row for row in rows if (row["kernel"], row["target"]) == (kernel, target)]
    assert mine
    for row in mine:
        assert wanted <= set(row["families"]), row
        assert (row["stack"], row["faults"]) == (0, [])


@needs_triton
@pytest.mark.parametrize(
    ("words", "wanted"), [("STL [R1], R2 ;", True), ("STG.E [R2], R1 ;", False)]
)
def test_frame_that_nothing_is_stored_to_is_no_spill(
    words: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_kernels.triton_support import aot

    monkeypatch.setattr(aot, "_asked", lambda *command: f"        /*0010*/   {words}")
    assert aot._touches_stack(b"") is wanted


def test_recorded_lowering_for_ascend_reaches_hivm_within_the_unified_buffer() -> None:
    path = Path(__file__).parents[1] / "benches" / "results" / "ascend.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    stuck = {row["op"] for row in rows if row["stage"] != "hivm" or row["fault"]}
    whole = {row["op"] for row in rows} - stuck
    assert len(whole) >= 15
    assert all(0 < row["ub_bytes"] <= 256 * 1024 for row in rows if row["op"] in whole)
    assert all(row["fault"] for row in rows if row["stage"] != "hivm")


def test_without_its_packages_lowering_for_ascend_says_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if find_spec("ascendnpuir") is not None:
        pytest.skip("they are installed")
    assert cli.main(["aot", "--targets", "ascend950", "--op", "rms_norm"]) == 2
    assert "an environment of its own with triton-ascend" in capsys.readouterr().err


@needs_triton
def test_new_spills_growth_and_lost_instructions_count_as_worse() -> None:
    from deepinfer_kernels.triton_support.aot import Compiled

    def row(**changed: Any) -> Compiled:
        same = Compiled("k", "v", "sm80", 100, 0, 10_000, 0, ("mma",), ())
        return replace(same, **changed)

    assert compare_aot.worse(row(), EARLIER) == ()
    assert compare_aot.worse(row(registers=105, shared=10_500), EARLIER) == ()
    assert compare_aot.worse(row(stack=8), EARLIER) == ("stack 8, was 0",)
    assert compare_aot.worse(row(registers=140), EARLIER) == ("registers 140, was 100",)
    assert compare_aot.worse(row(shared=20_000), EARLIER) == ("shared 20000, was 10000",)
    assert compare_aot.worse(row(families=()), EARLIER) == ("no mma instruction any more",)
    assert compare_aot.worse(row(kernel="new", faults=("spills",)), EARLIER) == ("spills",)


@needs_triton
def test_kernel_compiles_for_an_old_and_a_new_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    arguments = ["aot", "--op", "rms_norm", "--targets", "sm80,sm100a"]
    arguments += ["--variants", "1", "--out", str(out)]
    assert cli.main(arguments) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["target"], row["faults"]) for row in rows] == [("sm80", []), ("sm100a", [])]
    assert cli.main([*arguments[:-2], "--against", str(out)]) == 0
    assert "2 compilations, 0 broken" in capsys.readouterr().out
    assert cli.main(["aot", "--op", "rms_norm", "--targets", "sm70"]) == 2
