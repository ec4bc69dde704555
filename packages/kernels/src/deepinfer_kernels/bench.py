"""Time every back end, in one run with the ceilings of the machine and a numerics check.

Rows state bytes and operations of the call (from the operator's cost formula), the measured time,
its floor and the ratio of the two. The floor is the larger of two measured times: one torch copy
that moves as many bytes, just as warm in the caches, and the operations at the rate of a square
matrix product. On small shapes both are mostly call overhead, which is what a decode step pays.
Ratios compare best times. With one thread a time is what the process spent on the CPU: other
processes disturb it less, and of a call of many milliseconds no sample on a shared machine is free
of them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_kernels import __version__
from deepinfer_kernels.capability import capability
from deepinfer_kernels.devices import device_facts, require_present
from deepinfer_kernels.errors import NumericsError
from deepinfer_kernels.registry import OpSpec, default_registry
from deepinfer_kernels.testing import check_impl

__all__ = ["Ceilings", "Row", "measure_ceilings", "measure_op", "run", "timed"]

LARGE_FROM_BYTES = 4 << 20
CHECKED_SEEDS = 3
SAMPLE_SECONDS = 2e-4
CEILING_BYTES = 64 << 20
CEILING_SIDE = {"cpu": 256, "cuda": 8192}
"""Side of the square product: large enough to reach the rate, short enough to run undisturbed."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this device in this run."""

    copy_gb_per_s: float
    """Read plus write, past every cache."""
    matmul_gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One back end on one shape. Times in microseconds."""

    op: str
    shape: str
    backend: str
    best_us: float
    median_us: float
    p95_us: float
    bytes: int
    flops: int
    floor_us: float
    times_reference: float
    """Best time of the reference divided by this best time: above 1 is faster."""


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], seconds: float, device: str = "cpu") -> list[float]:
    """Microseconds a call, one sample a short batch of calls, sorted; at least 5 samples.

    Short, so that on a shared machine some samples run without an interruption.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    call()
    _synchronize(device)
    start = clock()
    call()
    _synchronize(device)
    once = clock() - start
    batch = max(1, int(SAMPLE_SECONDS / max(once, 1e-6)))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < end:
        start = clock()
        for _ in range(batch):
            call()
        _synchronize(device)
        samples.append((clock() - start) / batch * 1e6)
    return sorted(samples)


def measure_ceilings(device: str, dtype: torch.dtype, seconds: float) -> Ceilings:
    """Copy bandwidth past the caches and the rate of a square matrix product."""
    copy_us = copy_floor_us(CEILING_BYTES, device, seconds)
    side = CEILING_SIDE[device]
    square = torch.randn(side, side, device=device).to(dtype)
    matmul_us = timed(lambda: square @ square, seconds, device)[0]
    return Ceilings(CEILING_BYTES / copy_us / 1e3, 2 * side**3 / matmul_us / 1e3)


def copy_floor_us(moved: int, device: str, seconds: float) -> float:
    """Microseconds of the fastest torch copy that reads and writes ``moved`` bytes in all."""
    source = torch.ones(max(1, moved // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), seconds, device)[0]


def _on(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args)


def measure_op(
    spec: OpSpec, device: str, dtype: torch.dtype, seconds: float, large: bool, ceilings: Ceilings
) -> list[Row]:
    """Every back end that runs on the device, on every shape. Wrong results raise NumericsError."""
    have = capability(device)
    impls = [
        impl
        for impl in default_registry.impls(spec.name).values()
        if not (impl.requires.refusal(have) or impl.unavailable())
    ]
    for impl in impls:
        for seed in range(CHECKED_SEEDS):
            found = check_impl(spec, impl.fn, seed, dtype, device)
            if not found.excess <= 1:
                raise NumericsError(f"{spec.name} of {impl.backend} is wrong: {found.place}")
    rows: list[Row] = []
    for shape, args in spec.shapes(dtype).items():
        moved, flops = spec.cost(*args)
        if moved > LARGE_FROM_BYTES and not large:
            continue
        args = _on(args, device)
        floor = max(
            copy_floor_us(moved, device, seconds / 2), flops / ceilings.matmul_gflop_per_s / 1e3
        )
        reference_us = 0.0
        for impl in impls:
            with torch.inference_mode():
                samples = timed(lambda fn=impl.fn, args=args: fn(*args), seconds, device)
            best = samples[0]
            reference_us = best if impl.backend == "reference" else reference_us
            p95 = samples[int(0.95 * (len(samples) - 1))]
            rows.append(
                Row(
                    op=spec.name,
                    shape=shape,
                    backend=impl.backend,
                    best_us=round(best, 2),
                    median_us=round(statistics.median(samples), 2),
                    p95_us=round(p95, 2),
                    bytes=moved,
                    flops=flops,
                    floor_us=round(floor, 3),
                    times_reference=round(reference_us / best, 2),
                )
            )
    return rows


def run(
    device: str,
    ops: Sequence[str] | None,
    dtype_name: str,
    seconds: float,
    large: bool,
    out: str | None,
) -> int:
    """Print a table and, with ``out``, write it as JSON."""
    require_present(device)
    specs = [default_registry.spec(name) for name in ops or default_registry.op_names()]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype_name]
    ceilings = measure_ceilings(device, dtype, seconds)
    print(
        f"{device}, {torch.get_num_threads()} threads, {dtype_name}: "
        f"copy {ceilings.copy_gb_per_s:.1f} GB/s, matmul {ceilings.matmul_gflop_per_s:.0f} GFLOP/s"
    )
    print(
        f"{'operator':17} {'shape':22} {'back end':10} {'best us':>9} {'median us':>10} "
        f"{'p95 us':>9} {'floor us':>9} {'of floor':>9} {'x reference':>12}"
    )
    rows: list[Row] = []
    for spec in specs:
        for row in measure_op(spec, device, dtype, seconds, large, ceilings):
            rows.append(row)
            print(
                f"{row.op:17} {row.shape:22} {row.backend:10} {row.best_us:9.1f} "
                f"{row.median_us:10.1f} {row.p95_us:9.1f} {row.floor_us:9.2f} "
                f"{row.floor_us / row.best_us:9.1%} "
                f"{row.times_reference:12.1f}"
            )
    if out is not None:
        result = {
            **device_facts(device),
            "version": __version__,
            "threads": torch.get_num_threads(),
            "dtype": dtype_name,
            "ceilings": asdict(ceilings),
            "rows": [asdict(row) for row in rows],
        }
        Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
