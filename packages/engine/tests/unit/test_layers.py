"""Folders are layers: each imports only folders below it, lazily or not."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "deepinfer_engine"
LAYERS = (
    {"errors", "settings", "demo"},
    {"core"},
    {"adapters"},
    {"model", "kv"},
    {"codec", "pd", "parallel"},
    {"router"},
    {"offline", "server"},
    {"cli", "testing"},
)
"""Lowest first. `demo` is data. Folders of one layer do not import each other."""
LEVEL = {folder: level for level, layer in enumerate(LAYERS) for folder in layer}


def imported(path: Path) -> set[str]:
    """Folders and top modules of this package that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found.update(n.split(".")[1] for n in names if n.startswith("deepinfer_engine."))
    return found - {"__version__"}


def files() -> list[tuple[str, Path]]:
    """(folder or top module, file) of everything but the package's face."""
    parts = [
        (path.relative_to(SOURCE).with_suffix("").parts, path) for path in SOURCE.rglob("*.py")
    ]
    return [(names[0], path) for names, path in parts if names != ("__init__",)]


def test_every_folder_has_its_layer() -> None:
    assert {unit for unit, _ in files()} == set(LEVEL)


def test_imports_go_down() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {other}"
        for unit, path in files()
        for other in imported(path) - {unit}
        if other not in LAYERS[0] and LEVEL[other] >= LEVEL[unit]
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_below_imports_a_folder_above_errors_and_settings() -> None:
    for unit, path in files():
        if unit in LAYERS[0]:
            assert imported(path) - {unit} <= {"errors"}, path


def test_policy_knows_no_tensor_library() -> None:
    for unit, path in files():
        if unit == "core":
            text = path.read_text(encoding="utf-8")
            assert "import torch" not in text, f"{path} imports torch"
