"""Compiling and loading the C++ forms: what happens when a step fails."""

from __future__ import annotations

import ctypes
import inspect
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepinfer_kernels import ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.native import build, library, measured
from deepinfer_kernels.ops.rms_norm import reference as norm


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A loader that looks into an empty folder and remembers nothing."""

    def path(level: str) -> Path | None:
        found = tmp_path / build.library_name(level)
        return found if found.is_file() else None

    library._open.cache_clear()
    monkeypatch.setattr(library, "library_path", path)
    yield tmp_path
    library._open.cache_clear()


def _compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> Path:
    """A stand-in for the compiler; ``$last`` is the file it should write. Returns a folder."""
    path = folder / "compiler"
    write = 'all="$*"; for last; do :; done; '
    path.write_text(f"#!/bin/sh\n{write}{body}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    target = folder / "out"
    target.mkdir()
    return target


def test_missing_compiler_is_a_reason_and_not_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    built = build.build(tmp_path)
    assert built.files == {}
    assert set(built.failures) == set(build.levels())
    assert all("no C++ compiler found" in reason for reason in built.failures.values())
    assert list(tmp_path.iterdir()) == []


def test_failing_compiler_leaves_its_line_and_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = _compiler(monkeypatch, tmp_path, "echo 'error: no such flag' >&2; exit 1")
    built = build.build(target)
    assert set(built.failures) == set(build.levels())
    assert all("error: no such flag" in reason for reason in built.failures.values())
    assert list(target.iterdir()) == []


@pytest.mark.skipif(len(build.levels()) < 2, reason="one level on this machine type")
def test_compiler_that_does_not_know_one_level_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = 'case "$all" in *-mavx512f*) echo "error: -mavx512f?" >&2; exit 1;; esac; : > "$last"'
    built = build.build(_compiler(monkeypatch, tmp_path, body))
    assert set(built.failures) == {"v4"}
    assert set(built.files) == set(build.levels()) - {"v4"}
    assert all(path.is_file() for path in built.files.values())


def test_flags_name_single_features_that_old_compilers_know() -> None:
    for flags in build.levels().values():
        assert not any(flag.startswith("-march") for flag in (*build.FLAGS, *flags))


def test_compiler_without_a_static_runtime_is_asked_again_and_the_tag_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = 'case "$all" in *-static-lib*) exit 1;; esac; echo GLIBC_2.5 > "$last"'
    built = build.build(_compiler(monkeypatch, tmp_path, body))
    assert set(built.files) == set(build.levels())
    assert not built.tag.startswith("manylinux")


@pytest.mark.skipif(sys.platform != "linux", reason="the tag is of Linux")
def test_tag_is_that_of_the_newest_c_library_symbol(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = 'echo "GLIBC_2.14 GLIBC_2.29 GLIBC_2.4" > "$last"'
    built = build.build(_compiler(monkeypatch, tmp_path, body))
    assert built.tag == f"manylinux_2_29_{platform.machine()}"


def test_units_carry_the_hash_of_the_sources_and_every_operator_once(tmp_path: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in build._units(tmp_path)]
    assert all(build.source_hash() in text for text in texts)
    for path in build.exports():
        assert sum(str(path) in text for text in texts) == 1


def test_signatures_are_read_from_the_declarations() -> None:
    found = library.signatures()
    assert set(found) >= {path.parent.name for path in build.exports()}
    wanted = (ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_double, *[ctypes.c_int64] * 2)
    assert found["rms_norm"] == (*wanted, ctypes.c_void_p)


def test_absent_library_is_a_reason(fresh_library: Path) -> None:
    assert "is not built" in (library.unavailable() or "")
    with pytest.raises(OSError, match="native back end is not built"):
        library.load()


def test_unreadable_library_is_a_reason(fresh_library: Path) -> None:
    for level in build.levels():
        (fresh_library / build.library_name(level)).write_bytes(b"not a library")
    assert "cannot be loaded" in (library.unavailable() or "")


def test_library_of_other_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, fresh_library: Path
) -> None:
    monkeypatch.undo()
    if library.unavailable() is not None:
        pytest.skip("the native forms are not built here")
    library._open.cache_clear()
    monkeypatch.setattr(library, "source_hash", lambda: "0" * 64)
    assert "built from other sources" in (library.unavailable() or "")


def test_instruction_set_of_the_machine_limits_the_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert library._machine_levels() == ["base"]
    for name, able in (("AVX2", {"v3", "base"}), ("AVX512", {"v4", "v3", "base"})):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        assert set(library._machine_levels()) == able & set(build.levels())


def test_number_of_threads_changes_no_bit() -> None:
    g = seeded(2)
    streams, y = torch.randn(3000, 4, 192, generator=g), torch.randn(3000, 192, generator=g)
    post, comb = torch.rand(3000, 4, generator=g), torch.rand(3000, 4, 4, generator=g)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.mhc_post(y, streams, post, comb))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.skipif(library.unavailable() is not None, reason="the native forms are not built here")
def test_every_level_of_this_machine_computes_the_same_norm() -> None:
    x = torch.randn(3, 70, generator=seeded(0))
    wanted = norm.rms_norm(x, None, 1e-6)
    for level in library._machine_levels():
        path = library.library_path(level)
        assert path is not None
        lib = ctypes.CDLL(str(path))
        lib.di_rms_norm.argtypes = library.signatures()["rms_norm"]
        out = torch.empty_like(x)
        assert lib.di_rms_norm(0, x.data_ptr(), None, 1e-6, 3, 70, out.data_ptr()) == 0
        torch.testing.assert_close(out, wanted)
        assert lib.di_rms_norm(9, x.data_ptr(), None, 1e-6, 3, 70, out.data_ptr()) == 2


def test_strided_and_mixed_inputs_take_the_same_values() -> None:
    g = seeded(1)
    wide = torch.randn(4, 64, 2, generator=g)
    x = wide[:, :, 0]
    assert not x.is_contiguous()
    weight = torch.rand(64, generator=g)
    torch.testing.assert_close(
        ops.rms_norm(x, weight.double(), 1e-6), norm.rms_norm(x.contiguous(), weight, 1e-6)
    )
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-6), norm.rms_norm(x.contiguous(), weight, 1e-6)
    )


@pytest.mark.skipif(library.unavailable() is not None, reason="the native forms are not built here")
def test_without_avx2_the_faster_form_is_taken_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"native": 2e-6, "reference": 1e-6}

    def timed(call: Callable[[], object]) -> float:
        fn = inspect.getclosurevars(call).nonlocals["fn"]
        return seconds["native" if fn.__module__.endswith(".native") else "reference"]

    monkeypatch.setattr(measured, "level", lambda: "base")
    monkeypatch.setattr(measured, "best_time", timed)
    measured.refusal.cache_clear()
    try:
        reason = measured.refusal("swiglu") or ""
        assert "slower than reference" in reason
        assert "2 us against 1 us" in reason
        measured.refusal.cache_clear()
        seconds["native"] = 1e-6
        assert measured.refusal("swiglu") is None
    finally:
        measured.refusal.cache_clear()


def test_best_time_is_the_fastest_call_after_the_first() -> None:
    ticks = iter([0.0, 5.0, 5.0, 7.0, 7.0, 8.0, 8.0, 12.0, 12.0, 20.0])
    calls: list[int] = []
    assert measured.best_time(lambda: calls.append(1), lambda: next(ticks)) == 1.0
    assert len(calls) == 1 + measured.ROUNDS
