"""The reference's interface file, name by name: all of it exists here and is called alike."""

from __future__ import annotations

import ast
import enum
import inspect
from pathlib import Path
from typing import Any

import pytest

import deepinfer_recipe

reference: Any = pytest.importorskip(
    "deepseek_recipe", reason="install the extra `conformance` to compare with the reference"
)
INTERFACE = ast.parse(Path(reference.__file__).with_name("_native.pyi").read_text("utf-8"))
CLASSES = {node.name: node for node in INTERFACE.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = [
    (name, node)
    for name, body in CLASSES.items()
    for node in body.body
    if isinstance(node, ast.FunctionDef)
]
# `Name.Member: Name` in a class of constants, `name: type` elsewhere.
ATTRIBUTES = [
    (name, node.target.id, ast.unparse(node.annotation))
    for name, body in CLASSES.items()
    for node in body.body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
]
EXCEPTIONS = {
    "ConversionError": deepinfer_recipe.ConversionError("x"),
    "ImageError": deepinfer_recipe.ImageError("Fetch", "x"),
}


def ours(name: str) -> Any:
    return getattr(deepinfer_recipe, name)


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(item) for item in node.decorator_list}


def parameters(node: ast.FunctionDef) -> list[tuple[str, bool, bool, Any]]:
    """Name, whether by keyword only, whether required, default; without `self`."""
    arguments = node.args
    plain = arguments.args if "staticmethod" in decorators(node) else arguments.args[1:]
    defaults: list[Any] = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    found = [(p.arg, False, d) for p, d in zip(plain, defaults, strict=True)]
    found += [
        (p.arg, True, d) for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [
        (name, keyword, default is None, None if default is None else ast.unparse(default))
        for name, keyword, default in found
    ]


def shown(value: Any) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def test_every_public_name_of_the_reference_exists() -> None:
    assert set(reference.__all__) - set(deepinfer_recipe.__all__) == set()
    assert set(CLASSES) - set(deepinfer_recipe.__all__) == set()
    assert deepinfer_recipe.IMAGE_SPECIAL_TOKEN_ID == reference.IMAGE_SPECIAL_TOKEN_ID


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class_has_the_bases_of_the_reference(name: str) -> None:
    theirs, mine = getattr(reference, name), ours(name)
    for base in theirs.__mro__[1:-1]:
        known = getattr(deepinfer_recipe, base.__name__, base)
        assert issubclass(mine, known), base


@pytest.mark.parametrize(("name", "member", "kind"), ATTRIBUTES)
def test_attribute_or_constant_exists(name: str, member: str, kind: str) -> None:
    if kind == name:
        assert isinstance(getattr(ours(name), member), ours(name))
        assert member in str(getattr(reference, name).__dict__[member])
    else:
        holder = EXCEPTIONS.get(name) or ours(name)()
        assert hasattr(holder, member)


@pytest.mark.parametrize(
    ("name", "node"), FUNCTIONS, ids=[f"{name}.{node.name}" for name, node in FUNCTIONS]
)
def test_function_or_property_is_called_alike(name: str, node: ast.FunctionDef) -> None:
    mine = ours(name)
    marks = decorators(node)
    if "property" in marks or any(mark.endswith(".setter") for mark in marks):
        held = inspect.getattr_static(mine, node.name, None)
        is_field = node.name in getattr(mine, "__dataclass_fields__", ())
        is_slot = inspect.ismemberdescriptor(held)
        assert is_field or is_slot or isinstance(held, property)
        if any(mark.endswith(".setter") for mark in marks) and isinstance(held, property):
            assert held.fset is not None
        return
    is_static = isinstance(inspect.getattr_static(mine, node.name), staticmethod)
    assert is_static == ("staticmethod" in marks)
    callable_ = mine if node.name == "__init__" else getattr(mine, node.name)
    taken = list(inspect.signature(callable_).parameters.values())
    if node.name != "__init__" and not is_static:
        taken = taken[1:]
    by_name = {parameter.name: parameter for parameter in taken}
    wanted = parameters(node)
    positional = [
        parameter.name for parameter in taken if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert positional[: sum(not keyword for _, keyword, _, _ in wanted)] == [
        parameter for parameter, keyword, _, _ in wanted if not keyword
    ]
    for parameter, _, is_required, default in wanted:
        have = by_name[parameter]
        assert (have.default is have.empty) == is_required
        if not is_required and default not in ("...", None):
            assert shown(have.default) == str(default)
    for extra in set(by_name) - {parameter for parameter, *_ in wanted}:
        assert by_name[extra].default is not inspect.Parameter.empty, (
            f"{extra} is required here only"
        )
