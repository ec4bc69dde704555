"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

import ast
from pathlib import Path

from contract import PackageContract

import deepinfer_eplb


class TestContract(PackageContract):
    package = deepinfer_eplb
    heavy = ("torch", "numba", "matplotlib")
    preload = ("torch", "numba")
    leave_out = ("deepinfer_eplb.peers.vllm",)


SOURCE = Path(deepinfer_eplb.__file__).parent
LAYERS = (
    {"errors"},
    {"checks"},
    {"placement", "dispatch"},
    {"evaluation"},
    {"planning", "rearrange"},
    {"online", "peers"},
    {"bench"},
    {"cli", "__version__"},
)
"""From the lowest: a folder or top-level module imports only from layers before its own."""


def own_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            top, _, below = node.module.partition(".")
            if top == deepinfer_eplb.__name__:
                found |= {below.partition(".")[0]} if below else {a.name for a in node.names}
    return found


def test_folders_are_layers() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if where == "__init__":
            continue  # what the package exports
        at = next(i for i, names in enumerate(LAYERS) if where in names)
        own = LAYERS[at] if where == "cli" else {where}
        below = set().union(own, *LAYERS[:at])
        assert own_imports(path) <= below, path
