"""Every operator and back end on the shapes of a small model's decode step, one thread.

    python packages/kernels/benches/bench_ops.py [--large] [--record]

Prints best, median and p95 time, the share of the measured floor, and the gain over the reference;
``--record`` also writes benches/results/cpu.json, the evidence `deepinfer-kernels doctor` names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from deepinfer_kernels import bench

RESULT = Path(__file__).with_name("results") / "cpu.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="also the shapes of the full model")
    parser.add_argument("--record", action="store_true", help="write benches/results/cpu.json")
    parser.add_argument("--seconds", type=float, default=0.05, help="time a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULT.parent.mkdir(exist_ok=True)
    out = str(RESULT) if options.record else None
    return bench.run("cpu", None, "float32", options.seconds, options.large, out)


if __name__ == "__main__":
    raise SystemExit(main())
