"""Folders are layers: each imports only those below it. Files and functions stay readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "deepinfer_recipe"
# From the lowest to the highest; the modules beside them (`cli`, `__init__`) lie above all.
LAYERS = (
    "native",
    "base",
    "conversation",
    "prompts.formats",
    "prompts",
    "documents",
    "images",
    "stores",
    "parsing",
    "protocols.common",
    "protocols.chat",
    "protocols.messages",
    "protocols.responses",
    "protocols",
    "grammar",
    "serving",
    "check",
)
TOP = len(LAYERS)
ALLOWED_BESIDE = {("check", "")}  # the version, for its User-Agent


def layer_of(module: str) -> str:
    """The longest layer that a dotted name (without the package) lies in; "" for the top."""
    found = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    return max(found, key=len, default="")


def imports() -> Iterator[tuple[str, str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        own = layer_of(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "deepinfer_recipe"
            ):
                module = (node.module or "").removeprefix("deepinfer_recipe").lstrip(".")
                for name in node.names:
                    whole = f"{module}.{name.name}".lstrip(".")
                    yield str(path.relative_to(SOURCE)), own, layer_of(whole)


def rank(layer: str) -> int:
    return LAYERS.index(layer) if layer else TOP


def test_a_folder_imports_only_folders_below_it() -> None:
    upward = [
        f"{path} ({own or 'top'}) imports {used or 'top'}"
        for path, own, used in imports()
        if rank(used) > rank(own) and (own, used) not in ALLOWED_BESIDE
    ]
    assert upward == []


def test_the_protocols_do_not_import_each_other() -> None:
    apart = {"protocols.chat", "protocols.messages", "protocols.responses"}
    crossed = [p for p, own, used in imports() if {own, used} <= apart and own != used]
    assert crossed == []


def test_no_function_is_longer_than_sixty_lines() -> None:
    long = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []
