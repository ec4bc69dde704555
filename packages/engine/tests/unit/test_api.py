"""The public surface, with signatures; and that every module stands by itself."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import deepinfer_engine

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "deepinfer_engine"
INSTALLED = Path(deepinfer_engine.__file__).parent
PINNED = ROOT / "tests" / "api.txt"
MODULES = sorted(
    ".".join(("deepinfer_engine", *p.relative_to(INSTALLED).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    for p in INSTALLED.rglob("*.py")
)
IMPORT_NAMES = {"prometheus-client": "prometheus_client"}


def describe(name: str, value: Any) -> str:
    """One line a name, more for the fields and methods of a class."""
    if not inspect.isclass(value):
        return f"def {name}{inspect.signature(value)}"
    lines = [f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"]
    if dataclasses.is_dataclass(value):
        lines += [f"    {f.name}: {f.type}" for f in dataclasses.fields(value)]
    for member, function in sorted(vars(value).items()):
        hidden = member.startswith("_") and member != "__init__"
        if not hidden and inspect.isfunction(function) and not dataclasses.is_dataclass(value):
            lines.append(f"    def {member}{inspect.signature(function)}")
    return "\n".join(lines)


def test_the_public_interface_is_the_pinned_one(request: pytest.FixtureRequest) -> None:
    now = "\n".join(
        describe(name, getattr(deepinfer_engine, name)) for name in sorted(deepinfer_engine.__all__)
    )
    if request.config.getoption("--update-api"):
        PINNED.write_text(now + "\n")
    assert now + "\n" == PINNED.read_text(), "run pytest --update-api and tell the CHANGELOG"


def test_the_changelog_has_an_entry_for_this_version() -> None:
    assert f"## [{deepinfer_engine.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, deepinfer_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_module_imports_alone() -> None:
    """In one process a module, each with a fresh module table: finds cycles and hidden order."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for loaded in [m for m in sys.modules if m.startswith('deepinfer_engine')]:\n"
        "        del sys.modules[loaded]\n"
        "    importlib.import_module(name)\n"
    )
    extra = {"deepinfer_engine.adapters.search_fetch": "deepinfer_search_fetch"}
    names = [m for m in MODULES if m not in extra or find_spec(extra[m])]
    assert len(names) >= len(MODULES) - len(extra)
    subprocess.run([sys.executable, "-c", code, *names], check=True, timeout=120)


def test_every_third_party_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[\[<>=!~ ;]", line)[0].lower()
        for line in chain(project["dependencies"], *project["optional-dependencies"].values())
    }
    names = {IMPORT_NAMES.get(d, d.replace("-", "_")) for d in declared}
    names |= {"starlette", "anyio"}  # fastapi's own foundation, re-exported by it
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module
                else []
            )
            for module in found:
                top = module.split(".")[0]
                known = top in sys.stdlib_module_names or top == "deepinfer_engine" or top in names
                assert known, f"{path} imports {top}, which pyproject.toml does not declare"


def test_the_oldest_siblings_allowed_are_the_ones_tested() -> None:
    """Lower bounds equal the versions in the tree, so that this very run tests them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        match = re.fullmatch(r"deepinfer-([a-z_-]+)(?:\[[a-z,]+\])?>=(\d+\.\d+),<(\d+\.\d+)", line)
        if not line.startswith("deepinfer-"):
            continue
        assert match is not None, f"{line}: wanted a compatible range like >=0.1,<0.2"
        name, low, _ = match.groups()
        init = ROOT.parent / name / "src" / f"deepinfer_{name}" / "__init__.py"
        version = re.search(r'__version__ = "(\d+\.\d+)', init.read_text())
        assert version is not None
        assert version.group(1) == low, f"{name} is {version.group(1)}: run the tests on {low} too"
