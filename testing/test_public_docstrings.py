"""What packages export is described, errors included."""

from __future__ import annotations

from pathlib import Path

import pytest
from public_docstrings import exports, problems

PACKAGES = Path(__file__).parent.parent / "packages"
NAMES = sorted(p.name for p in PACKAGES.iterdir() if (p / "pyproject.toml").exists())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_says_what_it_is_and_raises(name: str) -> None:
    source = PACKAGES / name / "src"
    assert list(exports(source, f"deepinfer_{name}")), "nothing is exported: is this test right?"
    found = problems(source, f"deepinfer_{name}")
    assert not found, "\n".join(found)


def test_silence_is_found(tmp_path: Path) -> None:
    package = tmp_path / "src" / "p"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('from p.a import f, MyError\n__all__ = ["f", "MyError"]')
    (package / "a.py").write_text(
        'class MyError(Exception):\n    """Wrong."""\n\n'
        'def f():\n    """Does."""\n    raise MyError("x")\n'
    )
    assert [line.partition(": ")[2] for line in problems(tmp_path / "src", "p")] == [
        "f raises MyError and does not say so"
    ]
