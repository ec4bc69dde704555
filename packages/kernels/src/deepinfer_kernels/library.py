"""Every operator as ``torch.ops.deepinfer.<name>``, for torch.compile, export and graphs.

Registration happens when this module is imported. The kernel behind the name is the one the
registry chooses for the device at the time of the call.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_kernels.registry import Kernel, OpSpec, default_registry

__all__ = ["NAMESPACE", "operator"]

NAMESPACE = "deepinfer"
_DISPATCH = {"cpu": "CPU", "cuda": "CUDA"}

_library = torch.library.Library(NAMESPACE, "DEF")


def _chosen(name: str, device_type: str) -> Kernel:
    choose = default_registry.choose

    def call(*args: Any, **kwargs: Any) -> Any:
        return choose(name, device_type).impl.fn(*args, **kwargs)

    return call


def _register(spec: OpSpec) -> None:
    _library.define(spec.name + spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device_type, key in _DISPATCH.items():
        _library.impl(spec.name, _chosen(spec.name, device_type), key)
    torch.library.register_fake(f"{NAMESPACE}::{spec.name}", spec.fake, lib=_library)


def operator(name: str) -> Kernel:
    """``torch.ops.deepinfer.<name>``."""
    return getattr(getattr(torch.ops, NAMESPACE), name)


for _name in default_registry.op_names():
    _register(default_registry.spec(_name))
