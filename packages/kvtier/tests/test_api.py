"""The public interface as text, so that a change shows up as a diff; and what importing costs."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

import deepinfer_kvtier as package

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCE = ROOT / "src" / "deepinfer_kvtier"
SIBLINGS = ("recipe", "dspark", "eplb", "kernels", "engine", "search_fetch")


def signature(thing) -> str:
    text = str(inspect.signature(thing))
    text = re.sub(r"<factory>|<object object at 0x[0-9a-f]+>", "...", text)
    return text.replace("deepinfer_kvtier.", "").replace("typing.", "")


def describe_class(name: str, cls: type) -> list[str]:
    if issubclass(cls, enum.Enum):
        return [f"enum {name}: " + ", ".join(member.value for member in cls)]
    if issubclass(cls, BaseException):
        return [f"exception {name}({', '.join(base.__name__ for base in cls.__bases__)})"]
    lines = [f"class {name}"]
    if issubclass(cls, BaseModel):
        lines += [
            f"    {field}: {annotation}"
            for field, annotation in cls.__annotations__.items()
            if field != "model_config"
        ]
        return lines
    if dataclasses.is_dataclass(cls):
        lines += [
            f"    {f.name}: {f.type}" for f in dataclasses.fields(cls) if not f.name.startswith("_")
        ]
    elif hasattr(cls, "_fields"):
        lines += [f"    {name}: {cls.__annotations__[name]}" for name in cls._fields]
    elif "__init__" in vars(cls):
        lines.append(f"    __init__{signature(cls.__init__)}")
    for attribute, value in sorted(vars(cls).items()):
        if attribute.startswith("_") or isinstance(value, staticmethod):
            continue
        if isinstance(value, property):
            lines.append(f"    {attribute}: property")
        elif inspect.isfunction(value):
            kind = "async def" if inspect.iscoroutinefunction(value) else "def"
            lines.append(f"    {kind} {attribute}{signature(value)}")
    return lines


def dump() -> str:
    lines: list[str] = []
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type):
            lines += describe_class(name, value)
        elif callable(value):
            lines.append(f"def {name}{signature(value)}")
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return "\n".join(lines) + "\n"


def test_the_public_interface_is_the_recorded_one(request):
    recorded = HERE / "api.txt"
    if request.config.getoption("--update-api"):
        recorded.write_text(dump())
    assert dump() == recorded.read_text(), "run pytest --update-api and write a CHANGELOG entry"


def test_all_names_exist_and_are_named_once():
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_the_changelog_speaks_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    match = re.search(rf"^## \[{re.escape(package.__version__)}\].*?(?=^## |\Z)", text, re.M | re.S)
    assert match, f"no heading for {package.__version__}"
    assert re.search(r"^- ", match[0], re.M), "the heading has no entry"


MODULES = sorted(
    ".".join(("deepinfer_kvtier", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in SOURCE.rglob("[!_]*.py")
    if path.parent.name != "integrations"  # they import engines
)


def test_every_module_imports_alone(tmp_path):
    """Importing any module runs the package first, which loads most of them; each of the others is
    imported in a process of its own, forked from one that has loaded nothing of ours."""
    script = textwrap.dedent(
        """
        import importlib, os, sys
        import blake3, numpy, pydantic, typer, xxhash

        def in_child(name):
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                importlib.import_module(name)
                os.write(writing, "\\n".join(sys.modules).encode())
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                loaded = pipe.read().split("\\n")
            if os.waitpid(child, 0)[1]:
                sys.exit(f"{name} does not import alone")
            return loaded

        loaded = in_child("deepinfer_kvtier")
        for name in sys.argv[1:]:
            if name not in loaded:
                assert name in in_child(name)
        """
    )
    assert len(MODULES) > 100
    # Bytecode is kept between the children even where the environment forbids to write it.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script, *MODULES], check=True, env=env)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_every_import_is_declared_and_no_sibling_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=\[ ]", line)[0].lower() for line in project["dependencies"]}
    # What an extra brings is imported where it is used, with an error that names the extra.
    optional = {
        "windows/redis.py": {"redis"},
        "windows/mooncake.py": {"mooncake"},
        "pools.py": {"torch"},
        "sealing.py": {"cryptography"},
        "codec.py": {"zstandard"},
    }
    for path in (*SOURCE.glob("*.py"), *SOURCE.glob("windows/*.py")):
        extra = optional.get(str(path.relative_to(SOURCE)), set())
        foreign = imports_of(path) - set(sys.stdlib_module_names) - {"deepinfer_kvtier"}
        assert foreign <= declared | extra, f"{path.name} imports {sorted(foreign - declared)}"
        assert not {f"deepinfer_{name}" for name in SIBLINGS} & imports_of(path)


@pytest.mark.parametrize("module", ["deepinfer_kvtier", "deepinfer_kvtier.cli"])
def test_importing_loads_nothing_heavy(module):
    heavy = ["torch", "zstandard", "asyncio", "hypothesis", "tokenizers", "multiprocessing"]
    if module == "deepinfer_kvtier":
        heavy += ["typer", "rich"]
    script = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
