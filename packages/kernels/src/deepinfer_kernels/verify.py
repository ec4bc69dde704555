"""Fuzz every back end of a device against the reference on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from deepinfer_kernels.capability import capability
from deepinfer_kernels.devices import device_facts, require_present
from deepinfer_kernels.errors import BackendError
from deepinfer_kernels.registry import default_registry
from deepinfer_kernels.testing import DTYPES, Mismatch, check_impl, check_twin

__all__ = ["run", "sweep"]


def sweep(
    device_type: str,
    names: Sequence[str],
    cases: int,
    seed: int,
    only: str | None = None,
) -> Iterator[tuple[str, str, str, Mismatch]]:
    """Yield (operator, back end, dtype, worst mismatch); back end "float64" is the twin check."""
    have = capability(device_type)
    seeds = range(seed, seed + cases)
    for name, dtype in product(names, DTYPES):
        spec = default_registry.spec(name)
        label = str(dtype).removeprefix("torch.")
        if spec.twin and dtype is not torch.float64 and only is None:
            yield name, "float64", label, _worst(check_twin(spec, s, dtype) for s in seeds)
        for backend, impl in default_registry.impls(name).items():
            if only not in {None, backend}:
                continue
            if backend == "reference" and device_type == "cpu":
                continue  # it is the oracle
            if impl.requires.refusal(have) or impl.unavailable():
                continue
            found = (check_impl(spec, impl.fn, s, dtype, device_type) for s in seeds)
            yield name, backend, label, _worst(found)


def _worst(found: Iterable[Mismatch]) -> Mismatch:
    return max(found, key=lambda mismatch: mismatch.excess)


def run(
    device_type: str,
    ops: Sequence[str] | None,
    cases: int,
    seed: int,
    backend: str | None = None,
    out: str | None = None,
) -> int:
    """Print one line a check; 1 if any breaks its tolerance. ``out`` is evidence, as JSON."""
    require_present(device_type)
    names = [default_registry.spec(name).name for name in ops or default_registry.op_names()]
    print(f"{'operator':18} {'against':10} {'dtype':9} {'tolerance used':>14}  worst difference")
    broken = 0
    rows: list[dict[str, Any]] = []
    for name, against, dtype, worst in sweep(device_type, names, cases, seed, backend):
        bad = not worst.excess <= 1
        broken += bad
        mark = f"  BROKEN at {worst.place}" if bad else ""
        print(f"{name:18} {against:10} {dtype:9} {worst.excess:13.1%}  {worst.absolute:.3g}{mark}")
        row = {"op": name, "backend": against, "dtype": dtype, "broken": bad}
        rows.append(row | {"of_tolerance": worst.excess, "absolute": worst.absolute})
    if backend is not None and not rows:
        raise BackendError(f"no operator runs on back end {backend!r} here")
    if out is not None:
        result = {**device_facts(device_type), "cases": cases, "seed": seed, "rows": rows}
        Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if broken:
        print(f"{broken} checks broke their tolerance")
    return 1 if broken else 0
