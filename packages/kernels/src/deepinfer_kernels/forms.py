"""Finding the operators and their forms by where they lie: ``ops/<operator>/<back end>.py``."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deepinfer_kernels.capability import Requirement
from deepinfer_kernels.registry import Impl, Kernel, Registry
from deepinfer_kernels.triton_support import interp

__all__ = ["MEASURED", "register"]

MEASURED = "benches/results/cpu.json"
"""In the source tree; written by ``benches/bench_ops.py``."""

_ON_CPU = Requirement(frozenset({"cpu"}))


def _native_refusal(op: str) -> str | None:
    from deepinfer_kernels.native.measured import refusal  # it asks the registry

    return refusal(op)


def _triton_unavailable() -> str | None:
    if find_spec("triton") is None:
        return "needs triton: pip install 'deepinfer-kernels[triton]'"
    return None


def _triton_form(op: str) -> Kernel:
    """The form, whose module (and triton with it) is imported at the first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _load(op)(*args, **kwargs)

    return call


@cache
def _load(op: str) -> Kernel:
    return getattr(import_module(_module(op, "triton")), op)


def _module(op: str, part: str) -> str:
    return f"deepinfer_kernels.ops.{op}.{part}"


def _has(op: str, part: str) -> bool:
    return find_spec(_module(op, part)) is not None


def register(registry: Registry) -> None:
    """Fill a registry with every operator and every back end of this package."""
    ops = import_module("deepinfer_kernels.ops")
    for op in ops.__all__:
        registry.add_op(import_module(_module(op, "spec")).SPEC)
        if _has(op, "cpu"):
            fn = getattr(import_module(_module(op, "cpu")), op)
            registry.add_impl(Impl(op, "cpu", fn, _ON_CPU, evidence=MEASURED))
        if _has(op, "triton"):
            # In the interpreter the CPU stands in for the device: that is how these are tested.
            kinds = {"cuda", "cpu"} if interp.active() else {"cuda"}
            registry.add_impl(
                Impl(
                    op,
                    "triton",
                    _triton_form(op),
                    Requirement(frozenset(kinds)),
                    maturity="unmeasured",
                    unavailable=_triton_unavailable,
                )
            )
        if _has(op, "native"):
            fn = getattr(import_module(_module(op, "native")), op)
            registry.add_impl(
                Impl(
                    op,
                    "native",
                    fn,
                    _ON_CPU,
                    evidence=MEASURED,
                    unavailable=partial(_native_refusal, op),
                )
            )
