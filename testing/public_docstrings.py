"""Whether what a package exports says what it is, and what it raises.

Every exported function and class has a docstring, and so has every public method of an exported
class, or that of the class names it. Who raises an error that the package exports names it, or
says `raises`, in its own
docstring or in that of its class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Export:
    """Where an exported name is defined."""

    name: str
    path: Path
    node: Definition


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_file(source: Path, dotted: str) -> Path | None:
    """The file of a module of the package below `source`, the folder that holds the package."""
    base = source.joinpath(*dotted.split("."))
    return next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.exists()), None)


def definition(source: Path, path: Path, name: str) -> Export | None:
    """Where a name of a module comes from, through any number of imports within the package."""
    for node in parsed(path).body:
        if isinstance(node, Definition) and node.name == name:
            return Export(name, path, node)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                found = (
                    module_file(source, node.module)
                    if name == (alias.asname or alias.name)
                    else None
                )
                if found is not None and found != path:
                    return definition(source, found, alias.name)
    return None


def listed(path: Path) -> list[str]:
    """The names in `__all__` that are written out."""
    for node in parsed(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            value = node.value if isinstance(node, ast.Assign) else None
            if isinstance(value, ast.List | ast.Tuple):
                return [e.value for e in value.elts if isinstance(e, ast.Constant)]
    return []


def exports(source: Path, package: str) -> Iterator[Export]:
    """What a package exports; where it exports modules, what those list."""
    face = source / package / "__init__.py"
    names = listed(face) or sorted(
        alias.asname or alias.name
        for node in ast.walk(parsed(face))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package)
        for alias in node.names
    )
    for name in names:
        found = definition(source, face, name)
        if found is not None:
            yield found
            continue
        module = module_file(source, f"{package}.{name}")
        for inner in listed(module) if module is not None else ():
            found = definition(source, module, inner) if module is not None else None
            if found is not None:
                yield found


def raised(node: Function) -> set[str]:
    """Names of the errors that a function raises itself."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Raise) and part.exc is not None:
            call = part.exc.func if isinstance(part.exc, ast.Call) else part.exc
            found.add(ast.unparse(call).rpartition(".")[2])
    return found


def problems(source: Path, package: str) -> list[str]:
    """A line for each exported thing that says too little."""
    found = list(exports(source, package))
    errors = {
        e.name
        for e in found
        if isinstance(e.node, ast.ClassDef) and e.name.endswith(("Error", "Lost", "TooLong"))
    }
    out: list[str] = []
    for export in found:
        node = export.node
        about = ast.get_docstring(node)
        place = f"{export.path.relative_to(source)}:{node.lineno}: {export.name}"
        if not about:
            out.append(f"{place} has no docstring")
        if isinstance(node, Function):
            out += silent(node, about or "", errors, place)
            continue
        for member in node.body:
            if not isinstance(member, Function):
                continue
            public = not member.name.startswith("_")
            own = ast.get_docstring(member)
            where = (
                f"{export.path.relative_to(source)}:{member.lineno}: {export.name}.{member.name}"
            )
            told = f"`{member.name}`" in (about or "")
            inherited = own or told or inherits(source, export, member.name)
            if public and not inherited and not speaks_for_itself(member):
                out.append(f"{where} has no docstring")
            if public or member.name == "__init__":
                out += silent(member, f"{own or ''} {about or ''}", errors, where)
    return out


def inherits(source: Path, export: Export, member: str) -> bool:
    """Whether a base class of the package documents a member."""
    bases = export.node.bases if isinstance(export.node, ast.ClassDef) else ()
    for base in bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        found = definition(source, export.path, name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            continue
        for node in found.node.body:
            if isinstance(node, Function) and node.name == member and ast.get_docstring(node):
                return True
        if inherits(source, found, member):
            return True
    return False


def speaks_for_itself(member: Function) -> bool:
    """Properties and overloads."""
    marks = {ast.unparse(d).rpartition(".")[2] for d in member.decorator_list}
    return bool(marks & {"property", "cached_property", "overload", "setter", "override"})


def silent(node: Function, about: str, errors: set[str], place: str) -> list[str]:
    names = raised(node) & errors
    if not names or "aises" in about or "aise " in about or any(name in about for name in names):
        return []
    return [f"{place} raises {', '.join(sorted(names))} and does not say so"]
