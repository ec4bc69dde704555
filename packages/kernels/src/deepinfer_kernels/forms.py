"""Finding the operators and their forms by where they lie: ``ops/<operator>/<back end>.py``."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deepinfer_kernels import vendors
from deepinfer_kernels.capability import Requirement
from deepinfer_kernels.registry import Impl, Kernel, Registry
from deepinfer_kernels.triton_support import interp

__all__ = ["MEASURED", "WRITTEN_IN_TRITON", "register"]

MEASURED = "benches/results/cpu.json"
"""In the source tree; written by ``benches/bench_ops.py``."""

WRITTEN_IN_TRITON = {
    "sm100": frozenset({"tma", "tmem", "mx_mma"}),
    "triton": frozenset[str](),
}
"""Back ends in Triton's language, best first, with the features of a device that they need."""

_ON_CPU = Requirement(frozenset({"cpu"}))


def _native_refusal(op: str) -> str | None:
    from deepinfer_kernels.native.measured import refusal  # it asks the registry

    return refusal(op)


def _triton_unavailable() -> str | None:
    if find_spec("triton") is None:
        return "needs triton: pip install './packages/kernels[triton]'"
    return None


def _late_form(op: str, backend: str) -> Kernel:
    """The form, whose module (and triton with it) is imported at the first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _load(op, backend)(*args, **kwargs)

    return call


@cache
def _load(op: str, backend: str) -> Kernel:
    return getattr(import_module(_module(op, backend)), op)


def _on_gpu(features: frozenset[str] = frozenset()) -> Requirement:
    """In the interpreter the CPU stands in for any device: that is how these forms are tested."""
    if interp.active():
        return Requirement(frozenset({"cuda", "cpu"}))
    return Requirement(frozenset({"cuda"}), features)


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
        if _has(op, "vendor"):
            module = import_module(_module(op, "vendor"))
            registry.add_impl(
                Impl(
                    op,
                    "vendor",
                    getattr(module, op),
                    Requirement(frozenset({"cuda"}), WRITTEN_IN_TRITON["sm100"]),
                    maturity="experimental",
                    unavailable=partial(vendors.unavailable, module.LIBRARY),
                )
            )
        for backend, features in WRITTEN_IN_TRITON.items():
            if _has(op, backend):
                registry.add_impl(
                    Impl(
                        op,
                        backend,
                        _late_form(op, backend),
                        _on_gpu(features),
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
