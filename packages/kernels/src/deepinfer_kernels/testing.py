"""What proves a kernel: comparison within stated tolerances, guards, seeded cases.

Useful for kernels that do not live here too: register an `Impl`, then call `check_impl`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Compare one output; shape, dtype and the places of infinities and NaN must be equal."""
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


def _tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def run_case(spec: OpSpec, fn: Kernel, args: Sequence[Any]) -> list[Tensor]:
    """Call ``fn`` on private copies; returns its outputs and every tensor argument as left behind.

    Arguments are part of the result: a kernel that scribbles on an input, or past its slots in
    a cache, differs from the reference there.
    """
    copies = [_private(arg) if isinstance(arg, Tensor) else arg for arg in args]
    outputs = _tensors(fn(*copies))
    return outputs + [copy for copy in copies if isinstance(copy, Tensor)]


def _private(tensor: Tensor) -> Tensor:
    """A copy with the same strides and offset, in a buffer of its own."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype).set_(storage.clone())
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check_impl(spec: OpSpec, fn: Kernel, seed: int, dtype: torch.dtype) -> Mismatch:
    """Compare ``fn`` with the reference on one seeded case; returns the worst output."""
    args = spec.cases(seeded(seed), dtype)
    wanted = run_case(spec, spec.reference, args)
    got = run_case(spec, fn, args)
    if len(got) != len(wanted):
        raise NumericsError(f"{spec.name}: wanted {len(wanted)} results, got {len(got)}")
    return _worst(
        compare(g, w, spec.tolerance, dtype, f"{spec.name}[{i}] seed {seed} {dtype}")
        for i, (g, w) in enumerate(zip(got, wanted, strict=True))
    )


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


def _worst(found: Any) -> Mismatch:
    return max(found, key=lambda mismatch: mismatch.excess)
