"""The package is built in layers: a folder imports only those below it, nothing goes in circles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "deepinfer_kvtier"
HOUSE = Path(__file__).parent.parent / "benches" / "house.py"
LAYERS = ("base", "log", "host", "flow", "remote", "api", "simulation", "ops", "integrations")
"""From the bottom up. What stands at the top of the package may import all of them."""

REMOTE = ("wire", "location", "tiers", "state_exchange")
"""The parts of `remote`, from the bottom up."""

MODULES = {
    ".".join((SOURCE.name, *path.relative_to(SOURCE).with_suffix("").parts))
    for path in SOURCE.rglob("*.py")
}
TOP = {"__init__", "__main__", "faultrun", "faults", "testing"}
PACKAGE = "deepinfer_kvtier"


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, at its head or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith(f"{PACKAGE}.")}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
            names = {f"{node.module}.{a.name}" for a in node.names if a.name != "__version__"}
            if names:
                found |= names & MODULES or {node.module or ""}
    return found


def test_the_folders_are_the_layers_and_few_modules_stand_outside_of_them():
    assert {p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()} == set(LAYERS)
    assert {p.stem for p in SOURCE.glob("*.py")} == TOP
    assert len(TOP) <= 8


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_is_below_it(layer):
    above = LAYERS[LAYERS.index(layer) + 1 :]
    for path in (SOURCE / layer).rglob("*.py"):
        for name in imported(path):
            target = name.split(".")[1]
            assert target not in above, f"{path.relative_to(SOURCE)} imports {name}"
            allowed = target in LAYERS or target in ("testing", "faults")
            assert allowed, f"{path.relative_to(SOURCE)} imports {name}"


def test_a_part_of_remote_imports_only_what_is_below_it():
    for part in REMOTE:
        above = REMOTE[REMOTE.index(part) + 1 :]
        for path in (SOURCE / "remote" / part).rglob("*.py"):
            for name in imported(path):
                inside = name.split(".")[2] if name.startswith(f"{PACKAGE}.remote.") else None
                assert inside not in above, f"{path.relative_to(SOURCE)} imports {name}"


def test_no_module_imports_itself_by_way_of_others():
    graph: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[name] = imported(path)
    state: dict[str, int] = {}

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"a circle: {' -> '.join((*way, name))}"
        if name in state:
            return
        state[name] = 1
        for other in graph[name] & graph.keys():
            visit(other, (*way, name))
        state[name] = 2

    for name in graph:
        if name != PACKAGE:  # the face of the package imports everything
            visit(name, ())


def test_the_core_is_small_and_one_block_runs_through_few_files():
    """The figures of `benches/house.py`, which prints them by folder and file."""
    found = subprocess.run(
        [sys.executable, str(HOUSE)], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert int(re.search(r"core: (\d+) lines", found)[1]) <= 14_750
    assert int(re.search(r"of a block: (\d+) files", found)[1]) <= 25
