"""Folders of this package are layers, and no two modules import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import deepinfer_dspark as package

SOURCE = Path(package.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


LAYERS = (("",), ("drafters",), ("hf", "sim", "vllm", "check"), ("cli",))
"""Folders and, at the top, single modules; "" is every other module at the top. Each may import
its own layer's members of the same name and the layers before it."""


def layer_of(name: str) -> tuple[int, str]:
    """(height, member) of a module of this package."""
    member = [*name.split("."), ""][1]
    for height, members in enumerate(LAYERS):
        if member in members:
            return height, member
    return 0, ""


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & {name_of(p) for p in SOURCE.rglob("*.py")}


def test_folders_are_layers_and_modules_import_one_way() -> None:
    root, graph = package.__name__, dict[str, set[str]]()
    for path in sorted(SOURCE.rglob("*.py")):
        name = name_of(path)
        if name == root:
            continue  # the public names are gathered from all layers
        graph[name] = own_imports(path) - {root, name}
        for other in graph[name]:
            mine, theirs = layer_of(name), layer_of(other)
            assert theirs[0] < mine[0] or theirs == mine, f"{name} imports {other}"
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"import circle among {sorted(graph)}"
        for name in free:
            del graph[name]
