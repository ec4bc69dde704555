"""C++ forms, compiled when the package is installed. See `build` for how, `forms` for the calls.

This module itself loads nothing: `build` runs where torch is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_kernels.registry import Registry

__all__ = ["register"]

MEASURED = "benches/results/cpu.json"
"""In the source tree; written by ``benches/bench_ops.py``."""


def register(registry: Registry) -> None:
    """Add every form of this back end; where it is not built, each says so when asked for."""
    from deepinfer_kernels.capability import Requirement
    from deepinfer_kernels.native import forms
    from deepinfer_kernels.native.library import unavailable
    from deepinfer_kernels.registry import Impl

    on_cpu = Requirement(frozenset({"cpu"}))
    for op in forms.__all__:
        fn = getattr(forms, op)
        registry.add_impl(
            Impl(op, "native", fn, on_cpu, evidence=MEASURED, unavailable=unavailable)
        )
