"""Every file that a wheel ships and that is no Python stands in the table of what is shipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "packages/engine/docs/shipped-data.md"
BUILT = (".py", ".pyc", ".so", ".dll", ".dylib")


def patterns() -> list[tuple[str, str]]:
    """(package, pattern below its module) of every row."""
    found: list[tuple[str, str]] = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4:
            found += [(cells[0], name) for name in re.findall(r"`([^`]+)`", cells[1])]
    return found


def shipped() -> dict[str, set[str]]:
    """By package, what is no Python below its module."""
    found: dict[str, set[str]] = {}
    for folder in sorted(ROOT.glob("packages/*/src/*")):
        package = folder.parent.parent.name
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if "__pycache__" in path.parts:
                continue  # what compilers leave in a checkout
            if path.is_file() and path.suffix not in BUILT and path.name != "py.typed":
                found.setdefault(package, set()).add(name)
    return found


def test_every_shipped_file_has_a_row_with_its_origin() -> None:
    rows = patterns()
    assert rows
    for package, names in shipped().items():
        told = [Path(pattern) for owner, pattern in rows if owner == package]
        missing = [n for n in sorted(names) if not any(Path(n).match(str(p)) for p in told)]
        assert not missing, f"{TABLE.name} says nothing of {missing} in {package}"


@pytest.mark.parametrize(("package", "pattern"), patterns())
def test_every_row_is_of_files_that_are_there(package: str, pattern: str) -> None:
    (module,) = (ROOT / "packages" / package / "src").iterdir()
    assert list(module.glob(pattern)), f"{package} ships no {pattern}"
