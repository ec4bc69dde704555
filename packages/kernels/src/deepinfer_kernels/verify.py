"""Fuzz every back end of a device against the reference on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch

from deepinfer_kernels.capability import capability
from deepinfer_kernels.devices import require_present
from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.testing import DTYPES, Mismatch, check_impl, check_twin

__all__ = ["run", "sweep"]


def sweep(
    device_type: str, names: Sequence[str], cases: int, seed: int
) -> Iterator[tuple[str, str, str, Mismatch]]:
    """Yield (operator, back end, dtype, worst mismatch); back end "float64" is the twin check."""
    have = capability(device_type)
    seeds = range(seed, seed + cases)
    for name, dtype in product(names, DTYPES):
        spec = default_registry.spec(name)
        label = str(dtype).removeprefix("torch.")
        if spec.twin and dtype is not torch.float64:
            yield name, "float64", label, _worst(check_twin(spec, s, dtype) for s in seeds)
        for backend, impl in default_registry.impls(name).items():
            if backend == "reference" and device_type == "cpu":
                continue  # it is the oracle
            if impl.requires.refusal(have) or impl.unavailable():
                continue
            found = (check_impl(spec, impl.fn, s, dtype, device_type) for s in seeds)
            yield name, backend, label, _worst(found)


def _worst(found: Iterable[Mismatch]) -> Mismatch:
    return max(found, key=lambda mismatch: mismatch.excess)


def run(device_type: str, ops: Sequence[str] | None, cases: int, seed: int) -> int:
    """Print one line a check; 1 if any breaks its tolerance."""
    require_present(device_type)
    names = [default_registry.spec(name).name for name in ops or default_registry.op_names()]
    print(f"{'operator':18} {'against':10} {'dtype':9} {'tolerance used':>14}  worst difference")
    broken = 0
    for name, backend, dtype, worst in sweep(device_type, names, cases, seed):
        bad = not worst.excess <= 1
        broken += bad
        mark = f"  BROKEN at {worst.place}" if bad else ""
        print(f"{name:18} {backend:10} {dtype:9} {worst.excess:13.1%}  {worst.absolute:.3g}{mark}")
    if broken:
        print(f"{broken} checks broke their tolerance")
    return 1 if broken else 0
