"""`deepinfer-eplb`: judge plans on generated or recorded loads, draw them, run the live example."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.bench.compare import HEAD, Case, Row, compare
from deepinfer_eplb.bench.loads import KINDS, generate
from deepinfer_eplb.bench.svg import load_svg
from deepinfer_eplb.errors import EplbError, LoadError
from deepinfer_eplb.evaluation import evaluate, rank_loads, rank_shares
from deepinfer_eplb.placement import initial_placement
from deepinfer_eplb.planning.planner import plan
from deepinfer_eplb.planning.solver import compiled

MAX_LOAD_FILE = 4 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = argparse.ArgumentParser(prog="deepinfer-eplb", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="table of balance on unseen steps, beside baselines")
    bench.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    bench.add_argument("--seeds", type=int, nargs="+", default=[1])
    bench.add_argument("--layers", type=int, default=58)
    bench.add_argument("--experts", type=int, default=384)
    bench.add_argument("--ranks", type=int, default=64)
    bench.add_argument("--slots", type=int, default=448)
    bench.add_argument("--repeats", type=int, default=3, help="timed runs; the median is printed")
    bench.add_argument("--json", type=Path, help="write the rows here too")
    draw = commands.add_parser("draw", help="per-rank load before and after a plan, as SVG")
    draw.add_argument("output", type=Path)
    draw.add_argument("--kind", choices=sorted(KINDS), default="skew")
    draw.add_argument("--seed", type=int, default=1)
    draw.add_argument("--layer", type=int, default=0)
    draw.add_argument("--ranks", type=int, default=64)
    draw.add_argument("--slots", type=int, default=448)
    draw.add_argument("--loads", type=Path, help=".npy of recorded loads [steps, layers, experts]")
    live = commands.add_parser("demo", help="4 gloo processes rearrange a toy MoE while it runs")
    live.add_argument("--steps", type=int, default=120)
    live.add_argument(
        "--elastic",
        action="store_true",
        help="one process joins, one is killed, one leaves; --steps between two of these",
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "bench":
            return _bench(args)
        if args.command == "draw":
            return _draw(args)
        if args.elastic:
            from deepinfer_eplb.bench.elastic_demo import run_elastic

            return run_elastic(args.steps)
        from deepinfer_eplb.bench.demo import run_demo

        return run_demo(args.steps)
    except (EplbError, OSError, ImportError) as e:
        print(f"deepinfer-eplb: {e}", file=sys.stderr)
        return 1


def _bench(args: argparse.Namespace) -> int:
    case = Case(args.layers, args.experts, args.ranks, args.slots)
    print(f"{case}; compiled kernels: {'yes' if compiled() else 'no'}")
    print("B on unseen counts, sys = B - 1 on unseen expectations (bound 0), excess = B - floor")
    print(HEAD)
    rows: list[Row] = []
    for kind in args.kinds:
        for seed in args.seeds:
            found = compare(kind, seed, case, args.repeats)
            print("\n".join(row.line() for row in found), flush=True)
            rows += found
    if args.json:
        text = json.dumps([row.as_dict() for row in rows], indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _draw(args: argparse.Namespace) -> int:
    if args.loads is not None:
        loads, source = _read_loads(args.loads), args.loads.name
    else:
        loads, source = generate(args.kind, args.seed).counts, f"{args.kind}, seed {args.seed}"
    L, E = loads.shape[1:]
    if not 0 <= args.layer < L:
        raise LoadError(f"--layer wants 0..{L - 1}, got {args.layer}")
    half = max(1, loads.shape[0] // 2)
    window, unseen = loads[:half], loads[half:] if loads.shape[0] > 1 else loads
    before, after = (
        initial_placement(L, E, args.slots),
        plan(window, args.ranks, args.slots).phy2log,
    )
    panels = [_relative(unseen, p, args.layer, args.ranks) for p in (before, after)]
    B = [evaluate(unseen, p, args.ranks) for p in (before, after)]
    svg = load_svg(
        panels[0],
        panels[1],
        (f"linear placement: B = {B[0].B:.3f}", f"planned: B = {B[1].B:.3f}"),
        f"{source}: mean load of each rank on unseen steps, layer {args.layer}; "
        f"noise floor {B[1].floor:.3f}",
    )
    args.output.write_text(svg, encoding="utf-8")
    print(f"{args.output}: B {B[0].B:.3f} -> {B[1].B:.3f} (floor {B[1].floor:.3f})")
    return 0


def _relative(loads: Any, placement: npt.NDArray[np.int32], layer: int, G: int) -> Any:
    part = np.asarray(loads[:, layer : layer + 1], dtype=np.float64)
    shares = rank_shares(placement[layer : layer + 1], part.shape[2], G)
    mean = rank_loads(part, shares)[0].mean(axis=0)
    return mean / max(float(mean.mean()), 1e-300)


def _read_loads(path: Path) -> npt.NDArray[Any]:
    if path.stat().st_size > MAX_LOAD_FILE:
        raise LoadError(f"{path} is larger than {MAX_LOAD_FILE} bytes")
    try:
        loads = np.load(path, allow_pickle=False)
    except ValueError as e:
        raise LoadError(f"{path} is not a plain .npy array: {e}") from e
    if loads.ndim != 3:
        raise LoadError(f"{path} wants shape [steps, layers, experts], got {loads.shape}")
    return loads


if __name__ == "__main__":
    sys.exit(main())
