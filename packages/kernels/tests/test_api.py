"""The public interface is what tests/api.txt says; modules import alone and declare their needs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import deepinfer_kernels
from deepinfer_kernels import errors, formats, ops, registry, settings, testing

PACKAGE = Path(deepinfer_kernels.__file__).parent
PROJECT = Path(__file__).parents[1]
API = Path(__file__).with_name("api.txt")
MODULES = (errors, formats, ops, registry, settings, testing)


def _describe(name: str, thing: object) -> list[str]:
    if inspect.isclass(thing):
        bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
        lines = [f"class {name}({bases})"]
        if dataclasses.is_dataclass(thing):
            lines += [f"  {field.name}: {field.type}" for field in dataclasses.fields(thing)]
        for member, value in sorted(vars(thing).items()):
            if not member.startswith("_") and inspect.isfunction(value):
                lines.append(f"  def {member}{inspect.signature(value)}")
        return lines
    if inspect.isfunction(thing) or inspect.ismethod(thing):
        return [f"def {name}{inspect.signature(thing)}"]
    return [f"{name}"]


def _dump() -> str:
    lines: list[str] = []
    for module in MODULES:
        lines.append(f"[{module.__name__}]")
        for name in sorted(module.__all__):
            lines += _describe(name, getattr(module, name))
        lines.append("")
    return "\n".join(lines)


def test_public_interface_is_the_recorded_one(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-api"):
        API.write_text(_dump(), encoding="utf-8")
    assert _dump() == API.read_text(encoding="utf-8"), "run pytest --update-api, read the diff"


def test_every_public_name_of_the_package_is_a_module() -> None:
    for name in deepinfer_kernels.__all__:
        assert inspect.ismodule(getattr(deepinfer_kernels, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = deepinfer_kernels.nothing


def test_changelog_has_an_entry_for_the_version() -> None:
    text = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {deepinfer_kernels.__version__}" in text
    assert metadata.version("deepinfer-kernels") == deepinfer_kernels.__version__


def _modules() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def test_every_module_imports_alone() -> None:
    # Each module is imported in a process of its own, forked from one that has only torch loaded:
    # starting torch anew for each would take minutes.
    code = (
        "import os, sys, torch\n"
        "for name in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        __import__(name)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, name\n"
    )
    subprocess.run([sys.executable, "-c", code, *_modules()], check=True, timeout=120)


def test_third_party_imports_are_declared_and_no_sibling_is_imported() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[^\w-]", need)[0] for need in project["dependencies"]}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                own = top in sys.stdlib_module_names or top == "deepinfer_kernels"
                assert own or top in declared, f"{path.name} imports {name}"


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, deepinfer_kernels, deepinfer_kernels.cli, deepinfer_kernels.native.build\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_modules_of_the_api_are_where_the_package_says() -> None:
    for name in deepinfer_kernels.__all__:
        assert importlib.import_module(f"deepinfer_kernels.{name}") in MODULES
