"""From a typed public function to the kernel chosen for the device."""

from __future__ import annotations

import torch

from deepinfer_kernels import library
from deepinfer_kernels.registry import Kernel, default_registry

_choose = default_registry.choose


def kernel(name: str, device: torch.device) -> Kernel:
    """The chosen callable; under torch.compile the registered operator, which traces whole."""
    if torch.compiler.is_compiling():
        return library.operator(name)
    return _choose(name, device).impl.fn
