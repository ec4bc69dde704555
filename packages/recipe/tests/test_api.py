"""The public interface: a readable dump that changes only on purpose, and clean imports."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest

import deepinfer_recipe
from deepinfer_recipe.protocols.stream_event import StreamEvent

PACKAGE = Path(__file__).parents[1]
SOURCE = PACKAGE / "src"
API = Path(__file__).parent / "api.txt"
SIBLINGS = ("kvtier", "dspark", "eplb", "kernels", "engine", "search_fetch")
IMPORT_NAMES = {"pillow": "PIL", "jsonschema-rs": "jsonschema_rs"}
HEAVY = (
    "torch",
    "numpy",
    "tokenizers",
    "PIL",
    "httpx",
    "jsonschema_rs",
    "cryptography",
    "pypdf",
)


def signature(value: typing.Any) -> str:
    try:
        text = str(inspect.signature(value)).replace("deepinfer_recipe.", "")
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def constructor(value: type) -> str:
    """Signature of a constructor; nothing for what is inherited from Python itself."""
    owner = next(base for base in value.__mro__ if {"__init__", "__new__"} & set(vars(base)))
    return signature(value) if owner.__module__.startswith("deepinfer_recipe") else ""


def class_lines(name: str, value: type) -> list[str]:
    if issubclass(value, enum.Enum):
        return [f"{name}: enum {', '.join(member.name for member in value)}"]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    lines = [f"{name}: class({bases}){constructor(value)}"]
    if dataclasses.is_dataclass(value):
        lines += [f"  {field.name}: {field.type}" for field in dataclasses.fields(value)]
    seen: set[str] = set()
    for base in value.__mro__:
        if not base.__module__.startswith("deepinfer_recipe"):
            continue
        for member, item in sorted(vars(base).items()):
            if member.startswith("_") or member in seen:
                continue
            seen.add(member)
            if isinstance(item, property):
                returns = inspect.signature(item.fget).return_annotation  # type: ignore[arg-type]
                lines.append(f"  .{member}: {returns}")
            elif isinstance(item, staticmethod):
                lines.append(f"  .{member}: static{signature(item.__func__)}")
            elif member == "to_json" and issubclass(value, StreamEvent):
                lines.append("  .to_json(self) -> 'str'")  # may be the compiled form
            elif inspect.isfunction(item):
                lines.append(f"  .{member}{signature(item)}")
    return [lines[0], *sorted(lines[1:])]


def dump() -> str:
    lines: list[str] = []
    for name in sorted(deepinfer_recipe.__all__):
        value = getattr(deepinfer_recipe, name)
        if inspect.isclass(value):
            lines += class_lines(name, value)
        elif callable(value) and inspect.isfunction(value):
            lines.append(f"{name}: function{signature(value)}")
        elif name == "__version__":
            lines.append("__version__: str")
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return "\n".join(lines) + "\n"


def test_public_interface_is_the_one_on_record(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-api"):
        API.write_text(dump(), encoding="utf-8")
    assert dump() == API.read_text("utf-8"), "run pytest --update-api and tell the CHANGELOG"


def test_changelog_tells_of_this_version() -> None:
    text = (PACKAGE / "CHANGELOG.md").read_text("utf-8")
    version = re.escape(deepinfer_recipe.__version__)
    section = re.search(rf"^## {version}\b.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section
    assert section.group(1).strip()


def modules() -> list[str]:
    paths = sorted(SOURCE.rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


def test_every_module_imports_alone() -> None:
    # Importing any module runs the package's `__init__` first, which imports most of them:
    # one process in which each is then asked for shows all that a process each would.
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *modules()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import deepinfer_recipe, sys; print(*[m for m in sys.argv[1:] if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script, *HEAVY], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_every_third_party_import_is_declared_and_no_sibling_is_imported() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = [item for name in ("images", "pdf", "sealed", "grammar") for item in extras[name]]
    required = [*project["dependencies"], *optional]
    names = {re.split(r"[<>=!~\[ ]", item)[0].lower() for item in required}
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    for path in SOURCE.rglob("*.py"):
        third_party = imported(path) - set(sys.stdlib_module_names) - {"deepinfer_recipe"}
        assert third_party <= declared, path
        assert not third_party & {f"deepinfer_{name}" for name in SIBLINGS}, path
