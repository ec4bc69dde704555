"""The places in the code that a Markdown page names, and whether they are there.

A place is written as code: `engine/core/loop.py`, `engine/core/loop.py::EngineLoop.step`, or a
folder with a slash at its end. The path starts at the root of the repository, or with a package's
name, which stands for `packages/<name>/src/deepinfer_<name>`. What holds `<`, `*` or a space is a
pattern or a command and not looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PLACE = re.compile(r"(?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|toml|txt|json|yml|cpp|c))?(?:::[\w.]+)?")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def places(text: str) -> Iterator[str]:
    """Every place that a page names, in order."""
    for match in CODE.finditer(FENCE.sub("", text)):
        if PLACE.fullmatch(match.group(1)):
            yield match.group(1)


def resolve(root: Path, path: str) -> Path | None:
    """The file or folder a path stands for; None where there is none."""
    package, _, rest = path.partition("/")
    short = root / "packages" / package / "src" / f"deepinfer_{package}" / rest
    return next((found for found in (root / path, short) if found.exists()), None)


@cache
def names(path: Path) -> frozenset[str]:
    """What a module defines: functions, classes, `Class.member`, and assigned names."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


def problem(root: Path, place: str) -> str | None:
    """What is wrong with a place; None when it is there."""
    path, _, name = place.partition("::")
    found = resolve(root, path)
    if found is None:
        return f"{path} does not exist"
    if name and (found.suffix != ".py" or name not in names(found)):
        return f"{path} has no {name}"
    return None
