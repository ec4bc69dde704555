"""Calling a kernel: what every launch states, and recording instead of running."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.triton_support import interp

__all__ = ["Launch", "launch", "power_of_two", "recording", "torch_form"]

if interp.active():
    interp.repair()

FP_FUSION = True
"""Said on every launch and compilation: triton's own default changes with its version."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with the arguments it would have been called with."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int | None = None
    """Depth of the pipeline of a loop's loads; None for the compiler's own."""


_recorded: ContextVar[list[Launch] | None] = ContextVar("deepinfer_kernels_launches", default=None)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int | None = None,
    descriptors: bool = False,
    **constants: Any,
) -> None:
    """Run a kernel over a grid; an empty grid runs nothing.

    ``descriptors``: the kernel makes tensor descriptors, for which it needs memory of the device.
    """
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(Launch(kernel, args, constants, num_warps, num_stages))
    elif 0 not in grid:
        if descriptors and not interp.active():
            _give_memory(args)
        options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": FP_FUSION}
        if num_stages is not None:
            options["num_stages"] = num_stages
        kernel[grid](*args, **options, **constants)


def _give_memory(args: tuple[Any, ...]) -> None:
    import triton

    device = next(arg.device for arg in args if isinstance(arg, Tensor))

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)


@contextmanager
def recording() -> Generator[list[Launch], None, None]:
    """Launches inside the block are kept and not run; outputs hold no values."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def torch_form(*tensors: Tensor | None) -> bool:
    """Whether the call belongs to the torch form: float64, or a gradient is asked for."""
    grad = torch.is_grad_enabled()
    return any(
        t is not None and (t.dtype is torch.float64 or (grad and t.requires_grad)) for t in tensors
    )
