"""What proves a kernel: comparison within stated tolerances, guards, seeded cases.

Useful for kernels that do not live here too: register an `Impl`, then call `check_impl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.draw import seeded
from deepinfer_kernels.errors import NumericsError
from deepinfer_kernels.registry import Kernel, OpSpec, Tolerance

__all__ = ["Mismatch", "calc_diff", "check_impl", "check_twin", "compare", "run_case"]

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far two results are apart. ``excess`` above 1 breaks the tolerance."""

    excess: float
    absolute: float
    place: str


def calc_diff(got: Tensor, wanted: Tensor) -> float:
    """``1 - 2 <x, y> / (<x, x> + <y, y>)`` in float64: 0 for equal tensors."""
    x, y = got.double().flatten(), wanted.double().flatten()
    norms = float(x @ x + y @ y)
    return 0.0 if norms == 0 else 1 - 2 * float(x @ y) / norms


def compare(
    got: Tensor, wanted: Tensor, tolerance: Tolerance, dtype: torch.dtype, place: str = "output"
) -> Mismatch:
    """Compare one output; shape, dtype and the places of infinities and NaN must be equal.

    Raises NumericsError where results differ in number, shape or type.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise NumericsError(
            f"{place}: wanted {wanted.dtype} {list(wanted.shape)}, "
            f"got {got.dtype} {list(got.shape)}"
        )
    if not wanted.is_floating_point():
        wrong = int((got != wanted).sum())
        return Mismatch(float("inf") if wrong else 0.0, float(wrong), place)
    finite = wanted.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(
        got[~finite].nan_to_num(0.5), wanted[~finite].nan_to_num(0.5)
    ):
        return Mismatch(float("inf"), float("inf"), f"{place}: infinities or NaN differ")
    got64, wanted64 = got[finite].double(), wanted[finite].double()
    off = (got64 - wanted64).abs()
    if off.numel() == 0:
        return Mismatch(0.0, 0.0, place)
    absolute, relative = tolerance.of(dtype)
    allowed = absolute + relative * wanted64.abs()
    excess = torch.where(off == 0, 0.0, off / allowed)  # a tolerance of 0 demands equal bits
    return Mismatch(float(excess.max()), float(off.max()), place)


def _same_bits(got: Tensor, wanted: Tensor, place: str) -> Mismatch:
    wrong = int((got.view(torch.uint8) != wanted.view(torch.uint8)).sum())
    return Mismatch(float("inf") if wrong else 0.0, float(wrong), place)


def _tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def run_case(fn: Kernel, args: Sequence[Any], device: str = "cpu") -> list[Tensor]:
    """Call ``fn`` on private copies; returns its outputs, then the buffers of its arguments.

    The buffers are returned whole, with the bytes around and between the tensor's own: a kernel
    that scribbles on an input, or past its slots in a cache, differs from the reference there.
    """
    copies: list[Any] = []
    buffers: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            arg, buffer = _private(arg, device)
            buffers.append(buffer)
        copies.append(arg)
    return [result.cpu() for result in (*_tensors(fn(*copies)), *buffers)]


def _private(tensor: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """A copy with the same strides and offset, and the buffer it lies in."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device, copy=True)
    view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return view, whole


def check_impl(
    spec: OpSpec, fn: Kernel, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> Mismatch:
    """Compare ``fn`` on a device with the reference on the CPU, on one seeded case.

    Returns the worst of the outputs. Buffers of arguments must be equal bit for bit, but for
    numbers that the operator itself writes into one: they are compared like outputs.

    Raises NumericsError where results differ in number, shape or type.
    """
    args = spec.cases(seeded(seed), dtype)
    wanted = run_case(spec.reference, args)
    got = run_case(fn, args, device)
    if len(got) != len(wanted):
        raise NumericsError(f"{spec.name}: wanted {len(wanted)} results, got {len(got)}")
    tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    outputs = len(wanted) - len(tensors)
    found: list[Mismatch] = []
    for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
        place = f"{spec.name}[{i}] seed {seed} {dtype}"
        if i < outputs:
            found.append(compare(g, w, spec.tolerance, dtype, place))
            continue
        place += ": buffer of a tensor argument"
        position = tensors[i - outputs]
        if position in spec.writes and w.is_floating_point():
            # What the operator wrote is as near as an output; every other value is as it was.
            before = run_case(lambda *_: None, (args[position],))[0]
            kept = _bits(w) == _bits(before)
            found.append(_same_bits(g[kept], w[kept], place))
            found.append(compare(g[~kept], w[~kept], spec.tolerance, dtype, place))
        else:
            found.append(_same_bits(g, w, place))
    return _worst(found)


def _bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def check_twin(spec: OpSpec, seed: int, dtype: torch.dtype) -> Mismatch:
    """Compare the reference in ``dtype`` with itself in float64 on the same (rounded) arguments."""
    args = spec.cases(seeded(seed), dtype)
    wide = [
        arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args
    ]
    got = _tensors(spec.reference(*args))
    wanted = _tensors(spec.reference(*wide))
    return _worst(
        compare(g, w.to(g.dtype), spec.tolerance, dtype, f"{spec.name}[{i}] seed {seed} {dtype}")
        for i, (g, w) in enumerate(zip(got, wanted, strict=True))
    )


def _worst(found: Iterable[Mismatch]) -> Mismatch:
    return max(found, key=lambda mismatch: mismatch.excess)
