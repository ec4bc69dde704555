"""C++ forms, compiled when the package is installed. See `build` for how, `forms` for the calls."""

from __future__ import annotations

from deepinfer_kernels.capability import Requirement
from deepinfer_kernels.native import forms
from deepinfer_kernels.native.library import unavailable
from deepinfer_kernels.registry import Impl, Registry

__all__ = ["register"]


def register(registry: Registry) -> None:
    """Add every form of this back end; where it is not built, each says so when asked for."""
    for op in forms.__all__:
        requirement = Requirement(frozenset({"cpu"}))
        fn = getattr(forms, op)
        registry.add_impl(Impl(op, "native", fn, requirement, unavailable=unavailable))
