"""Operators of DeepSeek-V4.1 class models: one registry, a readable reference, a fast CPU form.

``ops`` holds the typed operators, ``ep`` the exchange of routed tokens between processes,
``formats`` the cache records, ``registry`` the choice of back end, ``batch_invariant`` forms whose
rows do not depend on each other, ``testing`` what proves a kernel of your own. They load on first
use: importing this package alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_kernels import batch_invariant, ep, errors, formats, ops, registry, testing

__all__ = ["batch_invariant", "ep", "errors", "formats", "ops", "registry", "testing"]

__version__ = "0.2.0"


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
