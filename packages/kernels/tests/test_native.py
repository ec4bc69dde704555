"""Compiling and loading the C++ forms: what happens when a step fails."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepinfer_kernels import ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.native import build, library
from deepinfer_kernels.reference import norm


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A loader that looks into an empty folder and remembers nothing."""
    library._open.cache_clear()
    monkeypatch.setattr(library, "library_path", lambda level: build.library_path(level, tmp_path))
    yield tmp_path
    library._open.cache_clear()


def _script(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_missing_compiler_is_a_reason_and_not_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler found" in (build.build(tmp_path) or "")
    assert list(tmp_path.iterdir()) == []


def test_failing_compiler_leaves_its_first_line_and_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", _script(tmp_path, "echo 'error: no such flag' >&2; exit 1"))
    target = tmp_path / "out"
    target.mkdir()
    assert "error: no such flag" in (build.build(target) or "")
    assert list(target.iterdir()) == []


def test_compiler_is_given_the_hash_of_the_sources_and_the_result_is_moved_into_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Writes its own arguments where the library should go.
    body = 'all="$*"; while [ $# -gt 1 ]; do shift; done; echo "$all" > "$1"'
    monkeypatch.setenv("CXX", _script(tmp_path, body))
    target = tmp_path / "out"
    target.mkdir()
    assert build.build(target) is None
    assert {path.name for path in target.iterdir()} == {
        build.library_path(level).name for level in build.levels()
    }
    for path in target.iterdir():
        assert build.source_hash() in path.read_text(encoding="utf-8")


def test_absent_library_is_a_reason(fresh_library: Path) -> None:
    assert "is not built" in (library.unavailable() or "")
    with pytest.raises(OSError, match="native back end is not built"):
        library.load()


def test_unreadable_library_is_a_reason(fresh_library: Path) -> None:
    for level in build.levels():
        build.library_path(level, fresh_library).write_bytes(b"not a library")
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


def test_compiler_without_openmp_is_asked_again_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = 'case "$*" in *-fopenmp*) exit 1;; esac; while [ $# -gt 1 ]; do shift; done; : > "$1"'
    monkeypatch.setenv("CXX", _script(tmp_path, body))
    target = tmp_path / "out"
    target.mkdir()
    assert build.build(target) is None
    assert len(list(target.iterdir())) == len(build.levels())


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
        lib = ctypes.CDLL(str(build.library_path(level)))
        lib.di_rms_norm.argtypes = library.SIGNATURES["rms_norm"]
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
