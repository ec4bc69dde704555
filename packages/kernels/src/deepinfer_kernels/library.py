"""Every operator as ``torch.ops.deepinfer.<name>``, for torch.compile, export and graphs.

Registration happens when this module is imported. The kernel behind the name is the one the
registry chooses for the device at the time of the call; a call that needs a gradient runs the torch
form, which autograd and its tracers look into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.registry import Kernel, OpSpec, default_registry
from deepinfer_kernels.torch_state import below_autograd

__all__ = ["NAMESPACE", "operator"]

NAMESPACE = "deepinfer"
_DISPATCH = {"cpu": "CPU", "cuda": "CUDA"}

_library = torch.library.Library(NAMESPACE, "DEF")


def _chosen(name: str, device_type: str) -> Kernel:
    choose = default_registry.choose

    def call(*args: Any, **kwargs: Any) -> Any:
        # A subclass that torch brought here is wrapped again on the way out.
        plain = [a.as_subclass(Tensor) if isinstance(a, Tensor) else a for a in args]
        return choose(name, device_type).impl.fn(*plain, **kwargs)

    return call


def _differentiable(spec: OpSpec) -> Kernel:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in (*args, *kwargs.values())
        ):
            return spec.reference(*args, **kwargs)
        with below_autograd():
            return operator(spec.name)(*args, **kwargs)

    return call


def _register(spec: OpSpec) -> None:
    _library.define(spec.name + spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device_type, key in _DISPATCH.items():
        _library.impl(spec.name, _chosen(spec.name, device_type), key)
    _library.impl(spec.name, _differentiable(spec), "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}", spec.fake, lib=_library)


def operator(name: str) -> Kernel:
    """``torch.ops.deepinfer.<name>``."""
    return getattr(getattr(torch.ops, NAMESPACE), name)


for _name in default_registry.op_names():
    _register(default_registry.spec(_name))
