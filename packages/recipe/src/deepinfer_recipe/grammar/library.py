"""xgrammar, imported without what grammars have no use for.

It imports transformers to read that library's tokenizers, and torch for masks as tensors: 0.7 and
1.2 CPU seconds and 250 MB in each process. Grammars here take their vocabulary as bytes and fill
masks of numpy, so transformers is imported when somebody asks for it, and a process that only
compiles does without torch. Both names are free again once xgrammar is there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from deepinfer_recipe.base.errors import GrammarUnavailable


def library() -> Any:
    """xgrammar. Raises `GrammarUnavailable` if it is not installed."""
    if "xgrammar" in sys.modules:
        return sys.modules["xgrammar"]
    with _standing_in("transformers", _class_of_transformers), _refusing():
        return importlib.import_module("xgrammar")


def library_without_torch() -> Any:
    """xgrammar in a process that fills no mask and imports torch nowhere else.

    Raises GrammarUnavailable; anything else means that this release cannot be imported so.
    """
    if "torch" in sys.modules:
        return library()
    with _refusing():
        # Its binding takes torch as optional; the library wants names to annotate with.
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
        try:
            importlib.import_module("tvm_ffi")
        finally:
            del sys.modules["torch"]
        with _standing_in("torch", _anything):
            return library()


@contextmanager
def _refusing() -> Generator[None]:
    try:
        yield
    except ImportError as missing:
        raise GrammarUnavailable(
            f'enforcing output constraints needs xgrammar ({missing}); install "deepinfer-recipe'
            '[grammar]"'
        ) from missing


@contextmanager
def _standing_in(name: str, attribute: Any) -> Generator[None]:
    """A module of this name while the block runs, unless there is one."""
    if name in sys.modules:
        yield
        return
    module = ModuleType(name)
    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = module
    try:
        yield
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]


class _Later(type):
    """A class of transformers that is looked up when an object is compared with it."""

    def __instancecheck__(cls, instance: object) -> bool:
        real = getattr(importlib.import_module("transformers"), cls.__name__)
        return isinstance(instance, real)


def _class_of_transformers(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Later(name, (), {})


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def take(self: object, *_: object, **__: object) -> None: ...

    return type(name, (), {"__init__": take})
