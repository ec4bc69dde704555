"""`deepinfer-eplb`: judge plans on generated or recorded loads, draw them, run the live example."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.baselines import per_step_policy, totals_policy
from deepinfer_eplb.errors import EplbError, LoadError
from deepinfer_eplb.evaluation import evaluate, rank_loads, rank_shares
from deepinfer_eplb.loads import KINDS, generate
from deepinfer_eplb.migration import moved_share
from deepinfer_eplb.placement import initial_placement
from deepinfer_eplb.planner import plan
from deepinfer_eplb.solver import compiled
from deepinfer_eplb.svg import load_svg

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
    bench.add_argument("--repeats", type=int, default=5, help="timed runs; the median is printed")
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
    args = parser.parse_args(argv)
    try:
        if args.command == "bench":
            return _bench(args)
        if args.command == "draw":
            return _draw(args)
        from deepinfer_eplb.demo import run_demo

        return run_demo(args.steps)
    except (EplbError, OSError, ImportError) as e:
        print(f"deepinfer-eplb: {e}", file=sys.stderr)
        return 1


def _timed(make: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """(result, median CPU seconds)."""
    times: list[float] = []
    result = make()
    for _ in range(max(repeats, 1)):
        start = time.process_time()
        result = make()
        times.append(time.process_time() - start)
    return result, statistics.median(times)


def _bench(args: argparse.Namespace) -> int:
    G, S = args.ranks, args.slots
    head = f"{args.layers} layers x {args.experts} experts, {G} ranks, {S} slots"
    print(f"{head}; compiled kernels: {'yes' if compiled() else 'no'}")
    print("B on unseen counts, sys = B - 1 on unseen expectations (bound 0), excess = B - floor")
    columns = f"{'load':8}{'seed':>5} {'policy':14}{'B':>8}{'floor':>8}{'excess':>8}{'sys':>8}"
    print(columns + f"{'ratio':>7}{'moved':>7}{'CPU s':>7}")
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        for seed in args.seeds:
            rows += _bench_one(kind, seed, args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _bench_one(kind: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan on the first 100 steps, replan on the next 100, judge on the 100 after those."""
    G, S = args.ranks, args.slots
    trace = generate(kind, seed, steps=300, layers=args.layers, experts=args.experts)
    past, window = trace.counts[:100], trace.counts[100:200]
    unseen, truth = trace.counts[200:], trace.expected[200:]
    old = plan(past, G, S).phy2log
    policies: dict[str, Callable[[], Any]] = {
        "linear": lambda: initial_placement(args.layers, args.experts, S),
        "totals": lambda: totals_policy(window, G, S),
        "per-step": lambda: per_step_policy(window, G, S),
        "keep": lambda: old,
        "plan, from old": lambda: plan(window, G, S, old).phy2log,
        "plan, full": lambda: plan(window, G, S).phy2log,
    }
    results = {name: _timed(make, args.repeats) for name, make in policies.items()}
    base = evaluate(truth, results["per-step"][0], G).B - 1.0
    rows: list[dict[str, Any]] = []
    for name, (placement, seconds) in results.items():
        seen, expected = evaluate(unseen, placement, G), evaluate(truth, placement, G).B - 1.0
        row = {
            "kind": kind,
            "seed": seed,
            "policy": name,
            "B": seen.B,
            "floor": seen.floor,
            "sys": expected,
            "ratio": expected / base,
            "moved": moved_share(old, placement, G),
            "cpu_s": seconds,
        }
        rows.append(row)
        print(
            f"{kind:8}{seed:5d} {name:14}{seen.B:8.4f}{seen.floor:8.4f}{seen.excess:8.4f}"
            f"{expected:8.4f}{row['ratio']:7.2f}{row['moved']:7.2f}{seconds:7.2f}",
            flush=True,
        )
    return rows


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
