from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

import deepinfer_search_fetch as package

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCE = ROOT / "src" / "deepinfer_search_fetch"
MODULES = sorted(
    "deepinfer_search_fetch"
    + "".join("." + p for p in f.relative_to(SOURCE).with_suffix("").parts if p != "__init__")
    for f in SOURCE.rglob("*.py")
)
IMPORT_TO_DISTRIBUTION = {
    "opensearchpy": "opensearch-py",
    "yaml": "pyyaml",
    "lxml_html_clean": "lxml_html_clean",
    "markdown_it": "markdown-it-py",
    "mcp_types": "mcp",
    "starlette": "fastapi",
}
SIBLINGS = {f"deepinfer_{n}" for n in ("recipe", "kvtier", "dspark", "eplb", "kernels", "engine")}


def describe(name: str) -> list[str]:
    thing = getattr(package, name)
    if inspect.isclass(thing):
        lines = [f"class {name}({', '.join(b.__name__ for b in thing.__bases__)})"]
        if issubclass(thing, BaseModel):
            lines += [f"  {k}: required={f.is_required()}" for k, f in thing.model_fields.items()]
        elif is_dataclass(thing):
            lines += [f"  {f.name}: {f.type}" for f in fields(thing)]
        for key, member in sorted(vars(thing).items()):
            if not key.startswith("_") and inspect.isfunction(member):
                lines.append(f"  def {key}{inspect.signature(member)}")
        return lines
    return [f"def {name}{inspect.signature(thing)}"]


def test_public_interface_is_the_recorded_one(request: pytest.FixtureRequest) -> None:
    found = "\n".join(line for name in sorted(package.__all__) for line in describe(name)) + "\n"
    recorded = HERE / "api.txt"
    if request.config.getoption("--update-api"):
        recorded.write_text(found)
    assert found == recorded.read_text(), "public interface changed: run pytest --update-api"


def test_every_version_has_a_changelog_entry() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(package.__version__)}\]?", text, re.M)


def test_every_module_imports_alone() -> None:
    # Third-party modules are loaded once; then a fork per module imports it with nothing of ours
    # loaded before.
    script = (
        "import importlib, os, sys, fastapi, h11, lxml.html, numpy, resiliparse, tantivy, typer\n"
        "for name in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        importlib.import_module(name); os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, name\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *MODULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_are_declared_and_no_sibling_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [d for name in extras if name not in ("test", "train") for d in extras[name]]
    wanted = [*project["dependencies"], *used]
    declared = {re.split(r"[<>=!\[ ]", d)[0].lower().replace("-", "_") for d in wanted}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                assert top not in SIBLINGS, f"{file}: {name}"
                if top in sys.stdlib_module_names or top == "deepinfer_search_fetch":
                    continue
                distribution = IMPORT_TO_DISTRIBUTION.get(top, top).lower().replace("-", "_")
                assert distribution in declared, f"{file} imports {top}, which is not declared"


def test_importing_the_package_loads_no_third_party_module() -> None:
    script = (
        "import sys; before = set(sys.modules); import deepinfer_search_fetch; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'deepinfer_search_fetch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name
