"""What the adapters of vendors' operators share."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.registry import default_registry

__all__ = ["next_best", "padded_slots", "pages_of"]

_log = logging.getLogger("deepinfer_kernels")
_told: set[tuple[str, str]] = set()
SLOTS = 64
"""Lists of slots have a length that is a multiple of this."""


def next_best(op: str, why: str, *args: Any) -> Any:
    """The call by the form after the vendor's, which does not take it. Said once a reason."""
    impls = default_registry.impls(op)
    kind = next(arg.device.type for arg in args if isinstance(arg, Tensor))
    backend = "triton" if kind == "cuda" and impls["triton"].unavailable() is None else "reference"
    if (op, why) not in _told:
        _told.add((op, why))
        _log.warning("%s: the vendor's form %s; %s runs instead", op, why, backend)
    return impls[backend].fn(*args)


def padded_slots(idx: Tensor, slots: int) -> Tensor:
    """int32 [n, 1, K']: -1 beyond the list, and for slots outside the cache, which are not checked
    there."""
    idx = idx.masked_fill((idx < 0) | (idx >= slots), -1).to(torch.int32)
    missing = -idx.shape[1] % SLOTS or (SLOTS if idx.shape[1] == 0 else 0)
    return torch.nn.functional.pad(idx, (0, missing), value=-1)[:, None].contiguous()


def pages_of(cache: Tensor, entries: int, width: int) -> Tensor | None:
    """uint8 [P, entries, 1, width] of the same memory, or None where pages lie otherwise."""
    apart = cache.stride(0)
    if apart % math.lcm(32, width) or cache.data_ptr() % 32:
        return None
    return cache.as_strided((cache.shape[0], entries, 1, width), (apart, width, width, 1))
