"""Memory that all processes of a group see: anonymous files of the kernel, passed by descriptor.

They have no name that another user could open, and are gone with the last process.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from deepinfer_engine.errors import ConfigError

POOLS = ("blocks", "states")
"""What is shared: the memory of the KV blocks and that of the state slots."""


def create() -> dict[str, int]:
    """An empty file for each of `POOLS`: name -> descriptor. Raises ConfigError."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("experts in several processes need Linux: this system has no memfd")
    return {name: os.memfd_create(f"deepinfer-{name}") for name in POOLS}


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] over such a file, which grows to that size: zero where nobody wrote."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if os.fstat(descriptor).st_size < nbytes:
        os.ftruncate(descriptor, nbytes)
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
