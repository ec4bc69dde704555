"""The public interface is what api.txt says, and the package stands alone."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deepinfer_dspark as package

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / package.__name__
API = Path(__file__).with_name("api.txt")
SIBLINGS = ("recipe", "kvtier", "dspark", "eplb", "kernels", "engine", "search_fetch")


def describe(name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        lines = [f"class {name}({', '.join(b.__name__ for b in value.__bases__)})"]
        if dataclasses.is_dataclass(value):
            lines += [f"    {f.name}: {f.type}" for f in dataclasses.fields(value)]
        for key, member in sorted(vars(value).items()):
            if key.startswith("_") and key != "__init__":
                continue
            if key == "__init__" and dataclasses.is_dataclass(value):
                continue
            function = (
                member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            )
            if inspect.isfunction(function):
                lines.append(f"    {key}{inspect.signature(function)}")
            elif isinstance(member, property):
                lines.append(f"    {key}: property")
        return lines
    return [f"def {name}{inspect.signature(value)}"]  # type: ignore[arg-type]


def test_public_names_and_signatures_are_the_recorded_ones(request: pytest.FixtureRequest) -> None:
    lines = [
        line for name in sorted(package.__all__) for line in describe(name, getattr(package, name))
    ]
    dump = "\n".join(lines) + "\n"
    if request.config.getoption("--update-api"):
        API.write_text(dump, encoding="utf-8")
    assert dump == API.read_text(encoding="utf-8"), "run pytest --update-api and add to CHANGELOG"


def test_changelog_has_an_entry_for_this_version() -> None:
    assert f"## [{package.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def modules() -> list[str]:
    names = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return {re.split(r"[<>=;\[ ]", r, maxsplit=1)[0].replace("-", "_") for g in groups for r in g}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_every_import_is_declared_and_no_sibling_is_imported(path: Path) -> None:
    third = imports(path) - set(sys.stdlib_module_names) - {package.__name__}
    assert third <= declared()
    assert not third & {f"deepinfer_{s}" for s in SIBLINGS}


def test_every_module_imports_alone() -> None:
    code = (
        "import importlib, os, sys\n"
        "for heavy in OPTIONAL:\n"  # once in the parent, so that a child loads our modules only
        "    try: importlib.import_module(heavy)\n"
        "    except ModuleNotFoundError: pass\n"
        "for name in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except ModuleNotFoundError as e:\n"
        "            if e.name.split('.')[0] in OPTIONAL: os._exit(0)\n"
        "            print(name, e, file=sys.stderr, flush=True)\n"
        "            os._exit(1)\n"
        "        except BaseException as e:\n"
        "            print(name, repr(e), file=sys.stderr, flush=True)\n"
        "            os._exit(1)\n"
        "        os._exit(0)\n"  # not the slow way out of a process that holds torch
        "    status = os.waitpid(pid, 0)[1]\n"
        "    assert status == 0, name\n"
    )
    code = f"OPTIONAL = {OPTIONAL!r}\n" + code
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *modules()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr


OPTIONAL = ("torch", "numba", "transformers", "safetensors", "vllm")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, {package.__name__}; print([m for m in {OPTIONAL!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
