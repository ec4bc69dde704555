"""Who may import whom: only `engine` imports other packages, and only through its adapters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "packages"
PACKAGES = sorted(p.name for p in ROOT.iterdir() if (p / "pyproject.toml").exists())


def imported(path: Path) -> set[str]:
    """Top-level module names that a file imports, lazily or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_there_are_seven_packages() -> None:
    assert PACKAGES == [
        "dspark",
        "engine",
        "eplb",
        "kernels",
        "kvtier",
        "recipe",
        "search_fetch",
    ]


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "engine"])
def test_a_library_imports_no_sibling(package: str) -> None:
    siblings = {f"deepinfer_{p}" for p in PACKAGES if p != package}
    for path in (ROOT / package).rglob("*.py"):
        assert not imported(path) & siblings, f"{path} imports a sibling package"


def test_the_engine_reaches_each_sibling_through_its_adapter_alone() -> None:
    source = ROOT / "engine" / "src" / "deepinfer_engine"
    siblings = {f"deepinfer_{p}" for p in PACKAGES if p != "engine"}
    for path in source.rglob("*.py"):
        found = imported(path) & siblings
        # adapters/<sibling>.py, or adapters/<sibling>_<part>.py where one file would be long.
        own = f"deepinfer_{path.stem}" if path.parent.name == "adapters" else ""
        allowed = {s for s in siblings if own == s or own.startswith(f"{s}_")}
        assert found <= allowed, f"{path} imports {found - allowed}; go through adapters/"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_can_be_published_by_itself(package: str) -> None:
    folder = ROOT / package
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests", "benches"):
        assert (folder / name).exists(), f"packages/{package}/{name} is missing"
    assert (folder / "src" / f"deepinfer_{package}" / "py.typed").exists()


def test_every_copy_of_the_address_rules_is_the_one_of_search_fetch() -> None:
    source = ROOT / "search_fetch/src/deepinfer_search_fetch/net/address_rules.json"
    wanted = source.read_bytes()
    copies = sorted(ROOT.rglob("src/**/address_rules.json"))
    assert {path.relative_to(ROOT).parts[0] for path in copies} == {"recipe", "search_fetch"}
    for copy in copies:
        assert copy.read_bytes() == wanted, f"{copy} differs; copy it from {source}"
