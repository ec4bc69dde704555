"""From a typed public function to the kernel chosen for its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.torch_state import dispatch_modes, in_transform, is_traced

_PLAIN = {Tensor, Parameter}
_choose = default_registry.choose


def dispatch(op: str, *args: Any) -> Any:
    """Call the operator: the chosen form, or what fits a tensor that no kernel can read.

    Traced, fake and other wrapped tensors go to the registered ``torch.ops.deepinfer`` operator,
    which knows fake forms and gradients. Under functorch transforms the torch form runs, which they
    can look into.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops.deepinfer, op)(*args)
    device: torch.device | None = None
    needs_gradient = False
    wrapped = dispatch_modes() > 0 or is_traced()
    for arg in args:
        if isinstance(arg, Tensor):
            if device is None:
                device = arg.device
            elif arg.device != device:
                raise ShapeError(
                    f"{op}: every tensor is on one device, got {device} and {arg.device}"
                )
            if arg.layout is not torch.strided:
                raise ShapeError(f"{op}: every tensor is dense, got {arg.layout}")
            wrapped = wrapped or type(arg) not in _PLAIN
            needs_gradient = needs_gradient or arg.requires_grad
    if in_transform():
        return default_registry.spec(op).reference(*args)
    if wrapped or (device is not None and device.type == "meta"):
        return getattr(torch.ops.deepinfer, op)(*args)
    impl = _choose(op, device or torch.device("cpu")).impl
    if needs_gradient and torch.is_grad_enabled() and not impl.differentiable:
        return default_registry.spec(op).reference(*args)
    return impl.fn(*args)
