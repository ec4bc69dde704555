"""What no default session runs still fits our sources: `callers.json` holds it, these hold that."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = HERE.parent / "packages"
CONFIG = json.loads(
    re.sub(r"^//.*$", "", (HERE / "callers.json").read_text(encoding="utf-8"), flags=re.MULTILINE)
)
CALLERS = {(HERE / path).resolve() for path in CONFIG["include"]}
OURS = sorted(path.name for path in PACKAGES.glob("*/src/deepinfer_*"))


def modules(path: Path) -> set[str]:
    """Modules of ours that a file imports, lazily or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name for name in names if name.split(".")[0] in OURS}


def exists(module: str) -> bool:
    package, *rest = module.split(".")
    (folder,) = PACKAGES.glob(f"*/src/{package}")
    target = folder.joinpath(*rest)
    return target.is_dir() or any(target.parent.glob(f"{target.name}.*"))


def test_every_module_of_ours_that_callers_import_exists() -> None:
    """The type check lets an import that does not resolve pass: most are of third parties."""
    for path in CALLERS:
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            gone = sorted(name for name in modules(file) if not exists(name))
            assert not gone, f"{file} imports {gone}"


def test_every_bench_and_example_is_checked_and_no_path_that_is_gone() -> None:
    for path in (*CONFIG["include"], *CONFIG["extraPaths"]):
        assert (HERE / path).exists(), f"testing/callers.json names {path}, which is gone"
    for kind in ("benches", "examples"):
        found = {folder for folder in PACKAGES.glob(f"*/{kind}") if any(folder.glob("*.py"))}
        assert found <= CALLERS, f"testing/callers.json lacks {sorted(found - CALLERS)}"
