"""What torch is doing around a call. torch has no public names for these; they stand here alone."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["below_autograd", "dispatch_modes", "in_transform", "is_traced"]

_C: Any = vars(torch)["_C"]

dispatch_modes = _C._len_torch_dispatch_stack
"""How many modes (fake tensors, make_fx, counters) see every operator of this thread."""
below_autograd = _C._AutoDispatchBelowAutograd
"""Context in which operators skip autograd."""
is_traced = _C._is_tracing
_transform_level = _C._functorch.maybe_current_level


def in_transform() -> bool:
    """Whether a functorch transform (vmap, grad, jvp) runs on this thread."""
    return _transform_level() is not None
